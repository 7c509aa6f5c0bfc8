"""Residual flows: densities of digits from blocks `x + g(x)` with Lipschitz bounds below 1."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jaxtyping import Array, Float

from manifoldmuon.manifolds import SpectralBall, Stiefel
from manifoldmuon.optim import chain, init_tree, muon, retract
from studies.certified.methods import SQUARES, Bjorck, Method, Muon, SpectralNorm, flat
from studies.datasets import batches, load_digits
from studies.display import COLOURS, dress, panels, short, text_table
from studies.estimates import estimate, half_width, shown
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option

LEVELS = 17
"""Grey levels of a pixel."""

EDGE = 0.05
"""The flow models the logit of `EDGE + (1 - 2 EDGE) z`, for dequantised images z in [0, 1]."""

CHUNK = 50
"""Steps between two measurements of the bound."""

DRAWS = 4
"""Draws of the noise for each image that is measured."""

MATRICES = "in", "out"
GAUSSIAN, RIVAL = "Gaussian, full covariance", "spectral norm, Adam"
WORST = "largest_bound", "iterations", "error"

Params = dict[str, Float[Array, "..."]]


_jit = functools.partial(jax.jit, static_argnames="c")


def logit(z: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
    """Return logits of dequantised images, and the log-determinants of the map."""
    p = EDGE + (1 - 2 * EDGE) * z
    up, down = jnp.log(p), jnp.log1p(-p)
    return up - down, (jnp.log(1 - 2 * EDGE) - up - down).sum(axis=-1)


def bits(log_density: Any, pixels: int) -> Any:
    """Return bits per pixel of discrete images, from the log-density of dequantised images."""
    return (np.log(LEVELS) - log_density / pixels) / np.log(2)


def residual(own: Params, x: Float[Array, "n d"], c: float) -> tuple[Array, Array]:
    """Return g(x), at most c times as steep as the product of the matrices' norms, and the slopes
    of its activation: LipSwish, with a learned sharpness (arXiv:1906.02735)."""
    sharp = jax.nn.softplus(own["sharpness"])

    def activation(t: Array) -> Array:
        return t * jax.nn.sigmoid(sharp * t) / 1.1

    before = x @ own["in"].T + own["bias"]
    after, slope = jax.jvp(activation, (before,), (jnp.ones_like(before),))
    return c * after @ own["out"].T, slope


def block(own: Params, x: Float[Array, "n d"], c: float) -> tuple[Array, Float[Array, " n"]]:
    """Apply a diagonal affine map, then `x + g(x)`; return log-determinants, too.

    The determinant of `I + c B D A` is that of `I + c D A B`, with the hidden width as size.
    """
    x = x * jnp.exp(own["scale"]) + own["shift"]
    move, slope = residual(own, x, c)
    inner = slope[..., None] * (c * own["in"] @ own["out"])
    return x + move, jnp.linalg.slogdet(jnp.eye(inner.shape[-1]) + inner)[1] + own["scale"].sum()


@_jit
def encode(params: Params, y: Float[Array, "n d"], c: float) -> tuple[Array, Float[Array, " n"]]:
    """Apply all blocks to logits; return log-determinants, too."""

    def apply(carry: Any, own: Params) -> Any:
        x, more = block(own, carry[0], c)
        return (x, carry[1] + more), None

    return jax.lax.scan(apply, (y, jnp.zeros_like(y[:, 0])), params)[0]


@_jit
def decode(params: Params, x: Float[Array, "n d"], c: float, iterations: Any) -> Array:
    """Invert `encode` by fixed-point iteration of each block."""

    def invert(y: Array, own: Params) -> Any:
        x = jax.lax.fori_loop(0, iterations, lambda _, x: y - residual(own, x, c)[0], y)
        return (x - own["shift"]) * jnp.exp(-own["scale"]), None

    return jax.lax.scan(invert, x, params, reverse=True)[0]


@_jit
def log_density(params: Params, z: Float[Array, "n d"], c: float) -> Float[Array, " n"]:
    """Return the log-density of dequantised images in [0, 1]."""
    y, first = logit(z)
    x, second = encode(params, y, c)
    return first + second + jax.scipy.stats.norm.logpdf(x).sum(axis=-1)


def bound(params: Params, c: float) -> float:
    """Return the largest Lipschitz bound of the blocks' g, from singular values in float64."""
    both = [np.asarray(params[k], np.float64) for k in MATRICES]
    if not all(np.isfinite(own).all() for own in both):
        return np.nan  # LAPACK would raise
    before, after = (np.linalg.norm(own, 2, (-2, -1)) for own in both)
    return float((c * before * after).max())


@dataclasses.dataclass(frozen=True)
class ProjectedAdam(Method):
    """Adam, then the retraction."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        direction = optax.scale_by_adam(momentum, SQUARES)
        return chain(direction, optax.scale_by_learning_rate(rate), retract(manifolds))


@dataclasses.dataclass(frozen=True)
class Capped(SpectralNorm):
    """Spectral normalisation of matrices above norm 1, as in i-ResNets (arXiv:1811.00995)."""

    def weight(self, free: Any, carry: Any) -> Any:
        unit = super().weight(free, carry)
        lengths = (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (free, unit))
        return jnp.where(jnp.greater(*lengths), unit, free)


@dataclasses.dataclass(frozen=True)
class ExactlyCapped(Capped):
    """The same with exact norms, from eigenvectors of Gram matrices."""

    def carried(self, free: Any, carry: Any) -> Any:
        frame = free.mT if free.shape[-2] < free.shape[-1] else free
        return jnp.linalg.eigh(frame.mT @ frame)[1][..., -1:]


@dataclasses.dataclass(frozen=True)
class CappedMuon(Capped):
    """Spectral normalisation, with Muon on the free arrays."""

    def optimizer(self, rate: Any, momentum: Any, manifolds: Any) -> optax.GradientTransformation:
        return muon(rate, flat(manifolds), momentum)


BALL, FRAMES = SpectralBall().for_training(), Stiefel().for_training()

METHODS: dict[str, tuple[Method, SpectralBall | Stiefel, float]] = {
    "SpectralBall, Muon": (Muon(-3), BALL, 0.95),
    "SpectralBall, Adam": (ProjectedAdam(-4), BALL, 0.9),
    "Stiefel, Muon": (Muon(-3), FRAMES, 0.95),
    RIVAL: (Capped(-4), BALL, 0.9),
    "exact norm, Adam": (ExactlyCapped(-4), BALL, 0.9),
    "spectral norm, Muon": (CappedMuon(-3), BALL, 0.95),
    "Björck, Adam": (Bjorck(-5), FRAMES, 0.9),
}
"""The method with log2 of its middle rate, the set of its matrices, and the momentum."""


@functools.lru_cache(maxsize=2)
def _images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return grey levels of the training and the test images."""
    data = load_digits(seed)
    train, test = (LEVELS - 1) * data.train_x, (LEVELS - 1) * data.test_x
    return train.reshape(len(train), -1), test.reshape(len(test), -1)


def _dequantise(key: Any, levels: Any) -> Any:
    return (levels + jax.random.uniform(key, levels.shape)) / LEVELS


def _start(seed: int, blocks: int, width: int) -> Params:
    """Return orthonormal matrices and a first affine map that standardises the logits."""
    y, _ = logit(_dequantise(jax.random.key(seed), _images(seed)[0]))
    pixels, keep = y.shape[1], jnp.zeros((blocks, y.shape[1]))
    shapes = {"in": (blocks, width, pixels), "out": (blocks, pixels, width)}
    templates = {k: jax.ShapeDtypeStruct(shape, y.dtype) for k, shape in shapes.items()}
    return {
        **init_tree(Stiefel().stacked(), jax.random.key(seed), templates),
        "bias": jnp.zeros((blocks, width)),
        "sharpness": jnp.full((blocks,), 0.5),
        "scale": keep.at[0].set(-jnp.log(y.std(axis=0))),
        "shift": keep.at[0].set(-y.mean(axis=0) / y.std(axis=0)),
    }


@functools.lru_cache(maxsize=1)
def _programs(name: str, blocks: int, width: int, steps: int, batch: int, c: float, rest: float):
    """Return functions: begin, take `CHUNK` steps, get the parameters of the flow."""
    method, manifold, momentum = METHODS[name]

    def optimizer(rate: Any) -> optax.GradientTransformation:
        decay = functools.partial(optax.linear_schedule, end_value=0.0, transition_steps=steps)
        body = method.optimizer(decay(rate), momentum, dict.fromkeys(MATRICES, manifold.stacked()))
        kinds: dict[Any, Any] = {"body": body, "rest": optax.adam(decay(rest), 0.9, SQUARES)}
        return optax.partition(kinds, lambda p: {k: "body" if k in MATRICES else "rest" for k in p})

    def carried(params: Params, own: Any) -> Any:
        return {k: method.carried(params[k], own[k]) for k in MATRICES}

    def flow(params: Params, own: Any) -> Params:
        return params | {k: method.weight(params[k], own[k]) for k in MATRICES}

    def begin(seed: int, rate: float) -> Any:
        params = _start(seed, blocks, width)
        own = {k: method.begin(params[k])[1] for k in MATRICES}  # arrays start as the matrices
        return params, own, optimizer(rate).init(params)

    def take(carry: Any, rate: Any, levels: Any, keys: Any) -> Any:
        def step(carry: Any, xs: Any) -> Any:
            params, own, state = carry
            own, z = carried(params, own), _dequantise(*xs)
            grads = jax.grad(lambda p: -log_density(flow(p, own), z, c).mean())(params)
            updates, state = optimizer(rate).update(grads, state, params)
            return (optax.apply_updates(params, updates), own, state), None

        return jax.lax.scan(step, carry, (keys, levels))[0]

    levels = jnp.zeros((CHUNK, batch, _images(0)[0].shape[1]))
    keys = jax.random.split(jax.random.key(0), CHUNK)
    compiled = jax.jit(take).lower(begin(0, 0.1), 0.1, levels, keys).compile()
    return begin, compiled, jax.jit(lambda carry: flow(carry[0], carried(*carry[:2])))


def trained(name: str, seed: int, rate: float, *sizes: Any) -> tuple[dict[str, Any], Params]:
    """Train and test a flow; return measurements and the parameters."""
    *_, steps, batch, c, _ = sizes
    begin, take, flow = _programs(name, *sizes)
    train, test = _images(seed)
    order = batches(seed, len(train), steps, batch).reshape(-1, CHUNK, batch)
    keys = jax.random.split(jax.random.key(seed), (len(order), CHUNK))
    carry, bounds, seconds = begin(seed, rate), [], 0.0
    for rows, own in zip(order, keys, strict=True):
        levels, clock = jnp.asarray(train[rows]), time.process_time()
        carry = jax.block_until_ready(take(carry, rate, levels, own))
        seconds += time.process_time() - clock
        bounds.append(bound(flow(carry), c))
    params, pixels = flow(carry), train.shape[1]

    def score(levels: np.ndarray) -> float:
        z = _dequantise(jax.random.key(seed), np.tile(levels, (DRAWS, 1)))
        return float(bits(log_density(params, z, c).mean(), pixels))

    found = {"bits": score(test), "train_bits": score(train), "milliseconds": 1e3 * seconds / steps}
    return {**found, "bound": bounds[-1], "largest_bound": max(bounds)}, params


def inversion(params: Params, levels: np.ndarray, c: float) -> dict[str, Any]:
    """Invert the flow of images in float64: iterations to an error of 1e-6 in all logits (None
    above 1000), and the largest error after 1000."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(value, jnp.float64) for name, value in params.items()}
        y, _ = logit((jnp.asarray(levels, jnp.float64) + 0.5) / LEVELS)
        x, _ = encode(wide, y, c)

        def error(iterations: int) -> float:
            return float(jnp.abs(decode(wide, x, c, iterations) - y).max())

        low, high, final = 0, 1000, error(1000)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if error(middle) <= 1e-6 else (middle, high)
    return {"iterations": high if final <= 1e-6 else None, "error": final}


@functools.lru_cache(maxsize=1)
def _tuned(name: str, seed: int, octaves: Sequence[int], *sizes: Any) -> tuple[float, Any]:
    """Return the best rate of the grid for a seed, and the bits of all rates."""
    rates = [2.0 ** (METHODS[name][0].log2_rate + octave) for octave in octaves]
    tried = [trained(name, seed, rate, *sizes)[0]["bits"] for rate in rates]
    best = int(np.nan_to_num(tried, nan=np.inf).argmin())
    return rates[best], {"rates": rates, "bits": tried}


def gaussian(seed: int) -> float:
    """Return bits per pixel under a Gaussian with full covariance, fitted to the logits."""
    train, test = (np.tile(levels, (DRAWS, 1)) for levels in _images(seed))
    y = np.asarray(logit(_dequantise(jax.random.key(seed), train))[0], np.float64)
    covariance: Any = np.cov(y.T) + 1e-2 * np.eye(y.shape[1])
    density = scipy.stats.multivariate_normal(y.mean(axis=0), covariance)
    y, slope = map(np.asarray, logit(_dequantise(jax.random.key(seed + 1), test)))
    return float(bits(np.mean(density.logpdf(y) + slope), y.shape[1]))


@dataclasses.dataclass(frozen=True)
class Flows(Study):
    """Which constraint and optimizer fit residual flows best?

    An invertible residual flow on scikit-learn's digits: images of 17 grey levels, dequantised
    uniformly, then logits. A block is a diagonal affine map, then `x + g(x)`: two dense matrices
    around LipSwish, times `coefficient`: a Lipschitz bound below 1 if both have norm at most 1.
    Log-determinants are exact. All methods start from the same orthonormal matrices and train other
    parameters with Adam at a fixed rate; all rates fall linearly to zero. The first seed chooses
    one of five rates by bits per pixel; the others count, paired with Adam under spectral
    normalisation (three power iterations in a step). Bounds are from singular values in float64,
    every 50 steps; inversion is by fixed-point iteration in float64; times are of the processor.
    """

    name: ClassVar[str] = "flows"

    # fmt: off
    methods: tuple[str, ...] = option(
        tuple(METHODS), f"methods for the matrices, {RIVAL!r} among them", choices=tuple(METHODS))
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4, 5), "seeds; the first tunes")
    octaves: tuple[int, ...] = option(
        (-2, -1, 0, 1, 2), "rates to try, in octaves from each method's own")
    blocks: int = option(8, "blocks of the flow")
    width: int = option(32, "hidden units of a block")
    coefficient: float = option(0.97, "bound on the Lipschitz constant of each g")
    steps: int = option(600, f"steps of each training, a multiple of {CHUNK}")
    batch: int = option(128, "images per step")
    rest: float = option(1e-2, "rate of Adam for other parameters")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(RIVAL, self.methods, self.seeds)
        if self.steps < CHUNK or self.steps % CHUNK or not 0 < self.coefficient < 1:
            raise ValueError(
                f"steps must be a multiple of {CHUNK}, coefficient between 0 and 1; got "
                f"{self.steps} and {self.coefficient}"
            )

    def cells(self) -> Sequence[Cell]:
        names = (*self.methods, GAUSSIAN)
        return [{"method": name, "seed": seed} for name in names for seed in self.seeds[1:]]

    def timed(self, cell: Cell) -> bool:
        return cell["method"] != GAUSSIAN

    def run(self, cell: Cell) -> Mapping[str, Any]:
        name, seed, c = cell["method"], cell["seed"], self.coefficient
        if name == GAUSSIAN:
            return {"bits": gaussian(seed)}
        sizes = self.blocks, self.width, self.steps, self.batch, c, self.rest
        rate, tried = _tuned(name, self.seeds[0], self.octaves, *sizes)
        found, params = trained(name, seed, rate, *sizes)
        return {"rate": rate, "tried": tried, **found, **inversion(params, _images(seed)[1], c)}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        def values(name: str, key: str) -> list[Any]:
            return [row[key] for row in rows if row["method"] == name]

        base = np.array(values(RIVAL, "bits"), np.float64)
        found: dict[str, Any] = {}
        for name in dict.fromkeys(row["method"] for row in rows):
            test = np.array(values(name, "bits"), np.float64)
            own = found[name] = {"bits": estimate(test), "beyond": estimate(test - base)}
            if name != GAUSSIAN:
                own |= {k: estimate(values(name, k)) for k in ("train_bits", "milliseconds")}
                worst = {k: values(name, k) for k in WORST}
                own |= {k: None if None in v else float(max(v)) for k, v in worst.items()}
                rate, rates = values(name, "rate")[0], values(name, "tried")[0]["rates"]
                own |= {"rate": rate, "edge": rate in (rates[0], rates[-1])}
        return found

    def table(self, record: Record) -> str:
        lines = [
            [name, short(own.get("rate"), "g"), shown(own["bits"], ".3f"),
             shown(own["beyond"], "+.3f"), shown(own.get("train_bits"), ".3f"),
             short(own.get("largest_bound"), ".4f"), short(own.get("iterations"), ".0f"),
             short(own.get("error")), shown(own.get("milliseconds"), ".1f")]
            for name, own in record["summary"].items()
        ]  # fmt: skip
        header = ["", "rate", "test bits", f"beyond {RIVAL}", "training bits", "largest bound",
                  "iterations", "error", "ms a step"]  # fmt: skip
        return text_table(header, lines)

    def plot(self, record: Record) -> Any:
        figure, grid = panels(1, 1, width=6.4, height=3.0)
        panel = grid[0, 0]
        names = [name for name in record["summary"] if name != GAUSSIAN]
        own = [record["summary"][name]["bits"] for name in names]
        bars = [half_width(value["interval"]) or 0.0 for value in own]
        panel.errorbar([value["mean"] for value in own], names, xerr=bars, fmt="o",
                       color=COLOURS[0], markersize=5, capsize=3)  # fmt: skip
        panel.invert_yaxis()
        dress(panel, "Residual flows of digits", "95 % intervals over seeds; less is better",
              "bits per pixel of test images", "")  # fmt: skip
        return figure
