"""Rotations before quantization: which optimizer, and which gradient of the quantizer?"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg
from jaxtyping import Array, Float, Int

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Orthogonal
from manifoldmuon.minimize import LBFGS, minimize
from manifoldmuon.norms import Frobenius, MaxAbs
from studies import training
from studies.datasets import TEXTS, batches, load_text, windows
from studies.display import BLUE, GREY, ORANGE, dress, panels, text_table
from studies.estimates import estimate, shown
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option
from studies.timing import interleaved_rounds

CONTEXT, WINDOWS, HEAD, BLOCKS = 64, 8, 32, 2
"""Characters per window, windows per step, width of a head, number of blocks."""

FIXED, STEP, NOISE = "", ", step", ", noise"
"""Endings of methods: what the gradient of `rounded` sees."""


# --- The network, its quantizer, and the fold ----------------------------------------------------


def rounded(x: Array, levels: Any, axis: int | tuple[int, ...], gradient: str = FIXED) -> Array:
    """Round to `levels + 1` equally spaced values between the extremes of x and zero.

    The gradient passes straight through the rounding. It holds the step, (high - low) / levels,
    constant (`FIXED`, as in SpinQuant), or differentiates it too (`STEP`, as in LSQ and OmniQuant).
    `NOISE` replaces the rounding errors by uniform noise, a smooth model (DiffQ, arXiv:2104.09987).
    """
    low = jnp.minimum(x.min(axis, keepdims=True), 0)
    step = (jnp.maximum(x.max(axis, keepdims=True), 0) - low) / levels
    step = jnp.where(step == 0, 1, step)
    error = jnp.round((x - low) / step) - (x - low) / step
    if gradient == NOISE:
        error = jax.random.uniform(jax.random.key(x.size), x.shape, minval=-0.5, maxval=0.5)
    step = jax.lax.stop_gradient(step) if gradient == FIXED else step
    return x + step * jax.lax.stop_gradient(error)


def new_network(key: Any, characters: int, width: int) -> dict[str, Any]:
    """Return a pre-norm transformer: matrices (in, out), gains of RMSNorms.

    Four channels of the embedding start at an offset of 1, ten times the deviation of the others:
    outliers as in large language models.
    """
    keys = iter(jax.random.split(key, 3 + 6 * BLOCKS))

    def normal(m: int, n: int, scale: float) -> Array:
        return scale * jax.random.normal(next(keys), (m, n))

    inner, one = width**-0.5, jnp.ones(width)
    end = inner / (2 * BLOCKS) ** 0.5
    blocks = [
        {name: normal(width, width, inner) for name in "qkv"}
        | {"o": normal(width, width, end), "up": normal(width, 4 * width, inner)}
        | {"down": normal(4 * width, width, end / 2), "norm1": one, "norm2": one}
        for _ in range(BLOCKS)
    ]
    embed = normal(characters, width, 0.1).at[:, :4].add(1)
    ends = {"position": normal(CONTEXT, width, 0.03), "head": normal(width, characters, inner)}
    return {"embed": embed, "blocks": blocks, "norm": one, **ends}


def logits(
    weights: Any, tokens: Int[Array, "n t"], levels: Any = None, gradient: str = FIXED
) -> Float[Array, "n t characters"]:
    """Apply the network; `levels` rounds the inputs (per token) and the weights (per output) of all
    linear layers in the blocks."""

    def linear(x: Array, w: Array) -> Array:
        if levels is None:
            return x @ w
        return rounded(x, levels[0], -1, gradient) @ rounded(w, levels[1], 0, gradient)

    def norm(x: Array, gain: Array) -> Array:
        return gain * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x = weights["embed"][tokens] + weights["position"]
    for block in weights["blocks"]:
        y = norm(x, block["norm1"])
        q, k, v = (linear(y, block[name]).reshape(*y.shape[:-1], -1, HEAD) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(y.shape)
        x = x + linear(y, block["o"])
        y = jax.nn.gelu(linear(norm(x, block["norm2"]), block["up"]))
        x = x + linear(y, block["down"])
    return norm(x, weights["norm"]) @ weights["head"]


def fold(weights: Any, rotations: Mapping[str, Array]) -> Any:
    """Return an equal network without gains: `R1` (width, width) turns the residual stream, `R2`
    (blocks, heads, HEAD, HEAD) the values of each head."""
    r1 = rotations["R1"]

    def into(w: Array, gain: Array) -> Array:
        return r1.T @ (gain[:, None] * w)

    def turned(block: Any, r2: Array) -> Any:
        new = {name: into(block[name], block["norm1"]) for name in "qkv"}
        values, outs = new["v"].reshape(len(r1), -1, HEAD), block["o"].reshape(-1, HEAD, len(r1))
        new["v"] = jnp.einsum("dhk,hkl->dhl", values, r2).reshape(r1.shape)
        new["o"] = jnp.einsum("hkl,hkd->hld", r2, outs).reshape(r1.shape) @ r1
        new |= {"up": into(block["up"], block["norm2"]), "down": block["down"] @ r1}
        return new | {"norm1": one, "norm2": one}

    one = jnp.ones(len(r1))
    new = {name: weights[name] @ r1 for name in ("embed", "position")}
    blocks = list(map(turned, weights["blocks"], rotations["R2"]))
    return new | {"blocks": blocks, "norm": one, "head": into(weights["head"], weights["norm"])}


def loss_of(weights: Any, pair: Any, levels: Any = None, gradient: str = FIXED) -> Array:
    """Return the mean cross-entropy of windows and their successors, in nats."""
    scores = logits(weights, pair[0], levels, gradient)
    return optax.softmax_cross_entropy_with_integer_labels(scores, pair[1]).mean()


# --- Methods -------------------------------------------------------------------------------------


def cayley_sgd(rate: optax.Schedule) -> optax.GradientTransformation:
    """Return SpinQuant's optimizer, without its rare QR (Li, Fuxin, Todorovic, arXiv:2002.01113).

    Steps are at most 1 / ||W||_1 long, for the skew-symmetric W; five fixed-point steps approximate
    the Cayley transform; rows are normalised before each step.
    """

    def step(point: Array, grad: Array, rate: Any) -> Array:
        x = (point / (jnp.linalg.norm(point, axis=-1, keepdims=True) + 1e-8)).mT
        half = -grad.mT @ x.mT
        half = half - 0.5 * x @ (x.mT @ half)
        skew = half - half.mT
        norm = jnp.abs(skew).sum(axis=-2, keepdims=True).max(axis=-1, keepdims=True)
        rate = jnp.minimum(1 / (norm + 1e-8), rate)
        y = x - rate * grad.mT
        for _ in range(5):
            y = x + rate * skew @ ((x + y) / 2)
        return y.mT - point

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda p, g: step(p, g, rate(state)), params, updates), state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def _geometry(manifold: Any) -> dict[str, Any]:
    return {"R1": manifold, "R2": manifold.stacked(2)}


GEOMETRY = _geometry(Orthogonal())


def _muon(manifold: Orthogonal) -> Callable[[optax.Schedule], Any]:
    return lambda rate: optim.manifold_muon(rate, _geometry(manifold), 0.9, track_gap=False)


def _signs(rate: optax.Schedule) -> optax.GradientTransformation:
    """Project the signs of the momentum, its direction in the largest entry, onto tangents."""
    project = optim.project_tangent(GEOMETRY)
    signs = optim.scale_by_steepest(_geometry(Euclidean(MaxAbs())), track_gap=False)
    last = optax.scale_by_learning_rate(rate), optim.retract(GEOMETRY)
    return optim.chain(project, optax.trace(0.9), signs, project, *last)


OPTIMIZERS: dict[str, tuple[Callable[[optax.Schedule], Any], int, int]] = {
    "Cayley SGD": (cayley_sgd, -5, -1),
    "riemannian_sgd": (lambda rate: optim.riemannian_sgd(rate, GEOMETRY, 0.9), -10, -3),
    "riemannian_adam": (lambda rate: optim.riemannian_adam(rate, GEOMETRY, 0.9, 0.95), -13, -9),
    "manifold_muon": (_muon(Orthogonal()), -12, -8),
    "Frobenius steps": (_muon(Orthogonal(step_norm=Frobenius())), -10, -7),
    "sign steps": (_signs, -14, -11),
}
"""Optimizers, with log2 of their lowest rates for the gradients `FIXED` and `STEP`."""

STARTS, RIVAL, SMOOTH = ("none", "random", "Hadamard"), "Cayley SGD, rate 1.5", "minimize, noise"
METHODS = (*STARTS, RIVAL, *OPTIMIZERS, *(f"{name}{STEP}" for name in OPTIMIZERS), SMOOTH)


def start_of(method: str, key: Any, width: int) -> dict[str, Array]:
    """Return the identity, random rotations, or random Hadamard matrices, where learning starts."""

    def draw(key: Any, n: int) -> Array:
        if method == "random":
            return Orthogonal().random_point(key, (n, n), jnp.float32)
        signs = jax.random.rademacher(key, (n, 1), jnp.float32)
        return jnp.eye(n) if method == "none" else signs * scipy.linalg.hadamard(n) / n**0.5

    first, *others = jax.random.split(key, 1 + BLOCKS * width // HEAD)
    r2 = jnp.stack([draw(key, HEAD) for key in others])
    return {"R1": draw(first, width), "R2": r2.reshape(BLOCKS, -1, HEAD, HEAD)}


@functools.cache
def _program(method: str, steps: int) -> Callable[..., Any]:
    make = cayley_sgd if method == RIVAL else OPTIMIZERS[method.removesuffix(STEP)][0]
    gradient = STEP if method.endswith(STEP) else FIXED

    def run(rate: Any, start: Any, weights: Any, pairs: Any, levels: Any) -> Any:
        def loss(rotations: Any, pair: Any) -> Any:
            return loss_of(fold(weights, rotations), pair, levels, gradient)

        tx = make(optax.linear_schedule(rate, 0.0, steps))
        return training.train(tx, loss, training.begin(tx, start), pairs)[0][0]

    return jax.jit(run)


def learn(method: str, problem: Any, steps: int) -> dict[str, Array]:
    """Return the rotations of a method for a `Quantization.problem`. `SMOOTH` reads as many windows
    as the others, 64 at a time, the same in each step."""
    _, start, weights, pairs, levels = problem
    if method in STARTS:
        return start
    if method != SMOOTH:
        return _program(method, steps)(*problem)
    rest = weights, jax.tree.map(lambda x: x.reshape(-1, CONTEXT)[:64], pairs), levels
    most = -(-steps * WINDOWS // 64)
    return minimize(_smooth, GEOMETRY, start, rest, method=LBFGS(), max_steps=most).point


def _smooth(rotations: Any, weights: Any, pair: Any, levels: Any) -> Array:
    return loss_of(fold(weights, rotations), pair, levels, NOISE)


@jax.jit
def _held_out(rotations: Any, weights: Any, pair: Any, levels: Any) -> tuple[Array, Array, Array]:
    folded, few = fold(weights, rotations), pair[0][:8]
    scores = logits(weights, few)
    change = jnp.max(jnp.abs(logits(folded, few) - scores)) / jnp.max(jnp.abs(scores))
    return loss_of(weights, pair), loss_of(folded, pair, levels), change


# --- The study -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantization(Study):
    """Which rotations make 4 bits cheap, and how are they learned?

    Trains a pre-norm character GPT with outlier channels, then rotations of its residual stream and
    of the values of each head, from random Hadamard matrices, by the loss of the network with
    weights of 4 bits and rounded inputs. Rates fall linearly to zero; each method tunes four, a
    factor of four apart, for each number of bits, on seeds that the report does not use. Cells with
    the budget `seconds` take as many steps as fit in the rival's time. Reported is the held-out
    loss of the quantized network beyond that of the network itself.
    """

    name: ClassVar[str] = "quantization"
    traced: ClassVar[tuple[str, ...]] = ("seed", "inputs")

    # fmt: off
    methods: tuple[str, ...] = option(METHODS, f"methods, {RIVAL!r} among them", choices=METHODS)
    inputs: tuple[int, ...] = option((8, 4), "bits for the inputs of layers")
    steps: int = option(100, "steps of 8 windows")
    width: int = option(64, "width of the residual stream, a power of two")
    pretraining: int = option(600, "steps of the network's own training, of 16 windows")
    text: str = option("pydoc", "text to train on", choices=TEXTS)
    data_dir: Path | None = option(None, "folder with tinyshakespeare.txt", recorded=False)
    tuning_seeds: tuple[int, ...] = option((10, 11), "seeds that choose the rates")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds of network, windows and rotations")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(RIVAL, self.methods, self.seeds)
        if min(self.steps, self.pretraining, *self.inputs) < 1 or self.width not in (32, 64, 128):
            raise ValueError(
                f"bits and steps must be at least 1, width 32, 64 or 128; got {self.inputs}, "
                f"{self.steps}, {self.pretraining} and {self.width}"
            )
        if not self.tuning_seeds or set(self.seeds) & set(self.tuning_seeds):
            raise ValueError(f"tuning_seeds must differ from seeds; got {self.tuning_seeds}")

    def cells(self) -> Sequence[Cell]:
        found = [("steps", method, inputs) for method in self.methods for inputs in self.inputs]
        fast = [name for name in self.methods if name.endswith(STEP) or name == SMOOTH]
        found += [("seconds", method, min(self.inputs)) for method in fast]
        return [
            {"budget": budget, "method": method, "inputs": inputs, "seed": seed}
            for budget, method, inputs in found
            for seed in self.seeds
        ]

    def timed(self, cell: Cell) -> bool:
        return cell["budget"] == "seconds"

    def run(self, cell: Cell) -> Mapping[str, Any]:
        method, inputs, steps = cell["method"], cell["inputs"], self.steps
        if cell["budget"] == "seconds":
            steps = max(1, round(steps * _paces(self)[method]))
        tuned = _tuned(self, method, inputs) if method.removesuffix(STEP) in OPTIMIZERS else {}
        rate = 2.0 ** tuned.get("log2_rate", np.log2(1.5))
        return {**tuned, "steps": steps, **self.measure(method, inputs, cell["seed"], rate, steps)}

    def measure(self, method: str, inputs: int, seed: int, rate: float, steps: int) -> Any:
        """Learn rotations; return held-out losses, the relative change of logits by the fold, and
        the largest distance of a rotation from its manifold."""
        problem = self.problem(inputs, seed, rate, steps, method)
        rotations, pair = learn(method, problem, steps), self.windows("validation", 0, 256)
        full, quantized, change = _held_out(rotations, problem[2], pair, problem[4])
        far = [float(jnp.max(Orthogonal().distance(x))) for x in rotations.values()]
        return {"full": full, "quantized": quantized, "change": change, "distance": max(far)}

    def problem(self, inputs: int, seed: int, rate: float, steps: int, method: str = RIVAL) -> Any:
        """Return the rate, the start, the network, windows for each step, and levels less one."""
        start = start_of(method, jax.random.key(1000 + seed), self.width)
        pairs = self.windows("train", 1000 + seed, WINDOWS * steps)
        pairs = tuple(x.reshape(steps, WINDOWS, CONTEXT) for x in pairs)
        return rate, start, _pretrained(self, seed), pairs, (2.0**inputs - 1, 15.0)

    def windows(self, part: str, seed: int, count: int) -> tuple[Array, Array]:
        tokens = getattr(load_text(self.text, self.data_dir), part)
        return windows(tokens, batches(seed, len(tokens) - CONTEXT, 1, count)[0], CONTEXT)

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Summarise each method; differences from the rival are paired by seed."""
        groups: dict[tuple[str, int], dict[str, list[Row]]] = {}
        for row in rows:
            own = groups.setdefault((row["budget"], row["inputs"]), {})
            own.setdefault(row["method"], []).append(row)

        def summary(own: Sequence[Row], rival: Sequence[Row]) -> dict[str, Any]:
            losses = np.array([row["quantized"] for row in own], np.float64)
            return {
                "cost": estimate(losses - [row["full"] for row in own]),
                "over_rival": estimate(losses - [row["quantized"] for row in rival]),
                **{key: own[0].get(key) for key in ("log2_rate", "edge", "steps")},
                **{key: max(row[key] for row in own) for key in ("change", "distance")},
            }

        return {
            f"{bits} bits, equal {budget}": {
                name: summary(own, groups["steps", bits][RIVAL]) for name, own in methods.items()
            }
            for (budget, bits), methods in groups.items()
        }

    def table(self, record: Record) -> str:
        header = "", "cost, nats", f"over {RIVAL}", "log2 rate", "steps", "change", "distance"
        texts = ["! marks the best rate at an end of its grid"]
        for setting, methods in record["summary"].items():
            lines = [
                [name, shown(own["cost"], ".4f"), shown(own["over_rival"], "+.4f"),
                 f"{own['log2_rate']}{'!' if own['edge'] else ''}", str(own["steps"]),
                 *(f"{own[key]:.0e}" for key in ("change", "distance"))]
                for name, own in methods.items()
            ]  # fmt: skip
            texts += [f"\ninputs: {setting}", text_table(header, lines)]
        return "\n".join(texts)

    def plot(self, record: Record) -> Any:
        settings = [x for x in record["summary"].items() if "steps" in x[0]]
        figure, grid = panels(1, len(settings), width=5.6, height=4.8)
        for panel, (setting, methods) in zip(grid[0], settings, strict=True):
            for at, (name, own) in enumerate(methods.items()):
                colour = (
                    GREY if name in STARTS else ORANGE if name in (RIVAL, *OPTIMIZERS) else BLUE
                )
                panel.plot(own["cost"]["interval"], [at, at], color=colour, linewidth=3)
                panel.plot(own["cost"]["mean"], at, "o", color=colour)
            panel.set_yticks(range(len(methods)), list(methods))
            panel.invert_yaxis()
            dress(panel, f"Weights of 4 bits, inputs of {setting.partition(' ')[0]}",
                  "step of the quantizer: constant (orange) or differentiated (blue)",
                  "loss beyond full precision, nats", "")  # fmt: skip
        return figure


@functools.lru_cache(maxsize=16)
def _pretrained(study: Quantization, seed: int) -> Any:
    """Return the weights of a network after its own training by Adam."""
    text, count = load_text(study.text, study.data_dir), study.pretraining
    tx = optax.adam(optax.linear_schedule(4e-3, 0.0, count), b2=0.95)
    tokens = jnp.asarray(text.train)
    order = jnp.asarray(batches(seed, len(tokens) - CONTEXT, count, 2 * WINDOWS))

    def loss(weights: Any, starts: Any) -> Any:
        return loss_of(weights, windows(tokens, starts, CONTEXT))

    carry = training.begin(tx, new_network(jax.random.key(seed), len(text.characters), study.width))
    return jax.jit(lambda carry: training.train(tx, loss, carry, order)[0][0])(carry)


@functools.lru_cache(maxsize=64)
def _tuned(study: Quantization, method: str, inputs: int) -> dict[str, Any]:
    """Return log2 of the best of four rates on the tuning seeds, whether it is an end of the grid,
    and the mean loss at each rate."""
    _, *lowest = OPTIMIZERS[method.removesuffix(STEP)]
    exponents = [lowest[method.endswith(STEP)] + 2 * k for k in range(4)]
    measured = functools.partial(study.measure, method, inputs, steps=study.steps)
    losses = [
        np.mean([measured(seed, 2.0**k)["quantized"] for seed in study.tuning_seeds])
        for k in exponents
    ]
    best = int(np.nanargmin(losses))
    return {"log2_rate": exponents[best], "edge": best in (0, 3), "tuning": losses}


@functools.lru_cache(maxsize=4)
def _paces(study: Quantization) -> dict[str, float]:
    """Return the processor time of the rival's run relative to each method's."""
    problem = study.problem(min(study.inputs), study.tuning_seeds[0], 1e-3, study.steps)
    runs = {name: functools.partial(learn, name, problem, study.steps) for name in study.methods}
    seconds = interleaved_rounds(runs, 2, clock=time.process_time)
    return {name: min(seconds[RIVAL]) / min(own) for name, own in seconds.items()}
