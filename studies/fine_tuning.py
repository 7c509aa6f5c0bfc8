"""Parameter-efficient fine-tuning: low-rank adapters (LoRA) and rotations, by optimizer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.ndimage
from jaxtyping import Array, Float

from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import FanRatio, RMSToRMS, Spectral
from manifoldmuon.optim import manifold_muon, muon
from studies import training
from studies.classification import accuracy, cross_entropy
from studies.datasets import FlatImages, batches, load_digits, standardise
from studies.display import COLOURS, dress, legend_above, panels, text_table
from studies.estimates import at_best_rate, estimate, shown
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option

BATCH = 64
RANK_OF_TARGET = 4
SHAPE_OF_TARGET = (64, 48)
PRETRAINING_STEPS = 400
METRICS = {"target": "log10_errors", "rotated": "losses"}

Factors = dict[str, Array]
Schedule = Callable[[Any], Any]


# --- Adapters: initial factors and adapted weights -----------------------------------------------


def lora(key: Any, base: Float[Array, "m n"], rank: int) -> Factors:
    """Return initial factors as in Flax's `nnx.LoRA`: A from He initialisation, B zero."""
    a = jax.nn.initializers.he_uniform(in_axis=1, out_axis=0)(key, (rank, base.shape[1]))
    return {"a": a, "b": jnp.zeros((base.shape[0], rank))}


def orthonormal_lora(key: Any, base: Float[Array, "m n"], rank: int) -> Factors:
    """Return LoRA factors with orthonormal rows of A, scaled to RMS-to-RMS norm 1, and B zero."""
    a = Stiefel(FanRatio()).random_point(key, (rank, base.shape[1]), jnp.float32)
    return {"a": a, "b": jnp.zeros((base.shape[0], rank))}


def stella(key: Any, base: Float[Array, "m n"], rank: int) -> Factors:
    """Return U and V with orthonormal columns, and S = 0 between them."""
    keys = jax.random.split(key)
    u, v = (
        Stiefel().random_point(own, (side, rank), jnp.float32)
        for own, side in zip(keys, base.shape, strict=True)
    )
    return {"u": u, "s": jnp.zeros((rank, rank)), "v": v}


def rotations(key: Any, base: Float[Array, "m n"], rank: int) -> Factors:
    """Return identity blocks over the fan-in, with at most as many entries as LoRA factors."""
    m, n = base.shape
    sizes = [size for size in range(1, n + 1) if n % size == 0 and size <= rank * (m + n) / n]
    return {"q": jnp.tile(jnp.eye(max(sizes)), (n // max(sizes), 1, 1))}


def adapted(base: Float[Array, "m n"], factors: Factors) -> Float[Array, "m n"]:
    """Apply the factors to a frozen weight."""
    if "q" in factors:
        blocks = base.reshape(len(base), *factors["q"].shape[:2])
        return jnp.einsum("mkb,kbc->mkc", blocks, factors["q"]).reshape(base.shape)
    if "s" in factors:
        return base + factors["u"] @ factors["s"] @ factors["v"].T
    if "w" in factors:
        return factors["w"]
    return base + factors["b"] @ factors["a"]


@dataclasses.dataclass(frozen=True)
class Method:
    """An adapter, its optimizer, and the base-2 logarithms of its learning rates."""

    init: Callable[[Any, Any, int], Factors]
    optimizer: Callable[[Schedule, int], optax.GradientTransformation]
    log2_rates: tuple[int, ...]


def _manifold(geometry: dict[str, Any]) -> Callable[[Schedule, int], optax.GradientTransformation]:
    return lambda rate, layers: manifold_muon(rate, [geometry] * layers)


def _flat(norm: Any) -> Callable[[Schedule, int], optax.GradientTransformation]:
    return lambda rate, layers: muon(rate, Euclidean(norm))


_GRID = tuple(range(8))
FREE = Euclidean(RMSToRMS())
METHODS = {
    "LoRA, Adam": Method(
        lora, lambda rate, layers: optax.adam(rate), tuple(k - 10 for k in _GRID)
    ),
    "LoRA, Muon": Method(lora, _flat(Spectral()), tuple(k - 8 for k in _GRID)),
    "LoRA, Muon in RMS": Method(lora, _flat(RMSToRMS()), tuple(k - 7 for k in _GRID)),
    "LoRA, A orthonormal": Method(
        orthonormal_lora, _manifold({"a": Stiefel(FanRatio()), "b": FREE}),
        tuple(k - 8 for k in _GRID),
    ),
    "StelLA": Method(
        stella, _manifold({"u": Stiefel(), "s": Euclidean(Spectral()), "v": Stiefel()}),
        tuple(k - 8 for k in _GRID),
    ),
    "OFT": Method(rotations, _manifold({"q": Stiefel().stacked()}), tuple(k - 7 for k in _GRID)),
    "all weights, Adam": Method(
        lambda key, base, rank: {"w": base}, lambda rate, layers: optax.adam(rate),
        tuple(k - 13 for k in _GRID),
    ),
}  # fmt: skip
RIVAL = "LoRA, Adam"


# --- Tasks ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def images_of(seed: int) -> tuple[FlatImages, FlatImages]:
    """Return the digits, upright and rotated by 45 degrees."""
    data = load_digits(seed)
    turned = data._replace(train_x=_turn(data.train_x), test_x=_turn(data.test_x))
    return standardise(data), standardise(turned)


def _turn(images: Any) -> Any:
    turned = scipy.ndimage.rotate(images, 45, axes=(2, 1), reshape=False, order=1)
    return turned.astype(np.float32)


@functools.lru_cache(maxsize=2)
def pretrained(hidden: tuple[int, ...], seed: int) -> list[Array]:
    """Return the weights of a classifier pretrained by Adam on upright digits."""
    upright, _ = images_of(seed)
    train_x, train_y = jnp.asarray(upright.train_x), jnp.asarray(upright.train_y)
    order = jnp.asarray(batches(seed, len(train_y), PRETRAINING_STEPS, BATCH))
    widths = upright.widths(hidden)
    keys = jax.random.split(jax.random.key(seed), len(widths))
    init = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)
    weights = [init(key, (m, n)) for key, n, m in zip(keys, widths[:-1], widths[1:], strict=False)]
    tx = optax.adam(optax.linear_schedule(2e-3, 0.0, PRETRAINING_STEPS))

    def loss(weights: Any, rows: Any) -> Any:
        return cross_entropy(weights, train_x[rows], train_y[rows], 1.0)

    return training.train(tx, loss, training.begin(tx, weights), order)[0][0]


@functools.lru_cache(maxsize=2)
def _tuned(method: str, rank: int, steps: int, loss: Any) -> Any:
    """Return a compiled program that trains with every rate of a grid."""
    chosen = METHODS[method]

    @jax.jit
    def run(bases: Any, data: Any, order: Any, key: Any, rates: Any) -> Any:
        keys = jax.random.split(key, len(bases))
        start = [chosen.init(own, base, rank) for own, base in zip(keys, bases, strict=True)]

        def train(rate: Any) -> Any:
            tx = chosen.optimizer(optax.cosine_decay_schedule(rate, steps), len(bases))

            def of_factors(factors: Any, rows: Any) -> Any:
                return loss(_weights(bases, factors), data, rows)

            factors = training.train(tx, of_factors, training.begin(tx, start), order)[0][0]
            return _weights(bases, factors)

        return jax.lax.map(train, rates), _weights(bases, start)

    return run


def _weights(bases: Any, factors: Any) -> Any:
    return [adapted(base, own) for base, own in zip(bases, factors, strict=True)]


def _classify(weights: Any, data: Any, rows: Any) -> Any:
    images, labels = data
    return cross_entropy(weights, images[rows], labels[rows], 1.0)


def _regress(weights: Any, data: Any, rows: Any) -> Any:
    inputs, target = data
    return jnp.mean(jnp.square(inputs[rows] @ (weights[0] - target).T))


# --- The study -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FineTuning(Study):
    """Which adapter, trained by which optimizer, fine-tunes best?

    Two tasks:

    * `target`: correct a linear layer by a matrix of rank 4. Metric: log10 of the relative squared
      error of the weight.
    * `rotated`: adapt a classifier of upright digits to digits rotated by 45 degrees. Metric:
      held-out cross-entropy.

    Every layer has an adapter and is otherwise frozen; every arm starts from the loss of the frozen
    network. Each arm is trained with eight learning rates, an octave apart, with cosine decay, and
    evaluated for each seed at the best rate of the other seeds. Gains are paired by seed.
    """

    name: ClassVar[str] = "fine-tuning"

    # fmt: off
    tasks: tuple[str, ...] = option(
        ("target", "rotated"), "tasks to fine-tune on", choices=tuple(METRICS))
    methods: tuple[str, ...] = option(tuple(METHODS), "adapters", choices=tuple(METHODS))
    rank: int = option(4, "rank of the adapters")
    steps: int = option(400, "steps of each training of a classifier, of 64 images")
    target_steps: int = option(100, "steps of each training of the linear layer, of 64 inputs")
    hidden: tuple[int, ...] = option((64, 64), "widths of the classifier's hidden layers")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds of data, weights, factors and batches")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(RIVAL, self.methods, self.seeds)
        counts = (self.rank, self.steps, self.target_steps, *self.hidden)
        if min(counts) < 1 or not self.hidden:
            raise ValueError(f"rank, steps and hidden widths must be at least 1; got {counts}")

    def cells(self) -> Sequence[Cell]:
        return [
            {"task": task, "method": method, "seed": seed}
            for task in self.tasks
            for method in self.methods
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        exponents = METHODS[cell["method"]].log2_rates
        key, rates = jax.random.key(1000 + cell["seed"]), 2.0 ** jnp.array(exponents, jnp.float32)
        target = cell["task"] == "target"
        bases, data, (images, labels) = self._target(cell) if target else self._digits(cell)
        loss = _regress if target else _classify
        steps = self.target_steps if target else self.steps
        order = batches(cell["seed"], len(data[0]), steps, BATCH)
        run = _tuned(cell["method"], self.rank, steps, loss)
        weights, start = run(bases, data, jnp.asarray(order), key, rates)
        jump = float(np.max([np.max(np.abs(a - b)) for a, b in zip(start, bases, strict=True)]))
        found: dict[str, Any] = {"log2_rates": exponents, "jump": jump}
        if target:
            off = jnp.square(weights[0] - data[1]).sum((-2, -1))
            whole = jnp.square(bases[0] - data[1]).sum()
            return found | {"log10_errors": np.log10(np.asarray(off / whole, np.float64) + 1e-20)}
        losses = jax.vmap(lambda w: cross_entropy(w, images, labels, 1.0))(weights)
        errors = 1 - jax.vmap(lambda w: accuracy(w, images, labels))(weights)
        return found | {"losses": losses, "errors": errors}

    def _target(self, cell: Cell) -> tuple[Any, Any, Any]:
        """Return a Gaussian weight, and inputs with the target weight as training and test data."""
        rng = np.random.default_rng(cell["seed"])
        m, n = SHAPE_OF_TARGET
        base = rng.normal(size=(m, n)) / np.sqrt(n)
        left, right = rng.normal(size=(m, RANK_OF_TARGET)), rng.normal(size=(RANK_OF_TARGET, n))
        off = left @ right / np.sqrt(m * n)
        inputs = rng.normal(size=(20 * BATCH, n))
        arrays = (jnp.asarray(x, jnp.float32) for x in (base, inputs, base + off))
        base, inputs, target = arrays
        return [base], (inputs, target), (inputs, target)

    def _digits(self, cell: Cell) -> tuple[Any, Any, Any]:
        """Return a pretrained classifier with rotated digits to train and test with."""
        train_x, train_y, *test = map(jnp.asarray, images_of(cell["seed"])[1][:4])
        return pretrained(self.hidden, cell["seed"]), (train_x, train_y), test

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            task: summary([row for row in rows if row["task"] == task], METRICS[task])
            for task in self.tasks
        }

    def table(self, record: Record) -> str:
        texts = []
        for task, arms in record["summary"].items():
            lines = [
                [" ".join([name, found["edge"]]).strip(), f"2^{found['log2_rate']}",
                 shown(found, "+.3f"), shown(found["gain"], "+.3f"),
                 shown(found.get("error"), ".1%")]
                for name, found in arms.items()
            ]  # fmt: skip
            header = ["", "rate", METRICS[task], f"gain over {RIVAL}", "errors"]
            texts += [f"{task}", text_table(header, lines), ""]
        return "\n".join(texts)

    def plot(self, record: Record) -> Any:
        return picture(record)


def summary(rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """Summarise every arm at its best rate, with its gain over `RIVAL`."""
    arms, values = {}, {}
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        values[method], at = at_best_rate(np.array([row[metric] for row in own], np.float64))
        exponents = own[0]["log2_rates"]
        edge = {0: "(at the lowest rate)", len(exponents) - 1: "(at the highest rate)"}.get(at, "")
        arms[method] = {
            "log2_rate": exponents[at], "edge": edge, **estimate(values[method]),
            "by_seed": values[method].tolist(),
            "by_rate": np.mean([row[metric] for row in own], axis=0).tolist(),
        }  # fmt: skip
        if "errors" in own[0]:
            arms[method]["error"] = estimate([row["errors"][at] for row in own])
    for method, arm in arms.items():
        arm["gain"] = estimate(values[RIVAL] - values[method]) if method != RIVAL else None
    return arms


def picture(record: Mapping[str, Any]) -> Any:
    """Plot the metric against the rate, with a panel for each task."""
    summaries = record["summary"]
    grids = {(r["task"], r["method"]): r["log2_rates"] for r in record["rows"]}
    figure, grid = panels(1, len(summaries), width=5.2, height=4.2)
    for panel, (task, arms) in zip(grid[0], summaries.items(), strict=True):
        for colour, (name, found) in zip(COLOURS, arms.items(), strict=False):
            best = found["log2_rate"]
            octaves = [exponent - best for exponent in grids[task, name]]
            panel.plot(octaves, found["by_rate"], "o-", color=colour, markersize=3, label=name)
        if task != "target":
            low = min(min(found["by_rate"]) for found in arms.values())
            panel.set_ylim(0.8 * low, 12 * low)
            panel.set_yscale("log")
        dress(panel, f"{task}, rank {record['settings']['rank']}",
              "mean over seeds", "octaves from the arm's best rate",
              "log10 of the relative error" if task == "target" else "held-out loss")  # fmt: skip
    legend_above(figure, grid[0, 0])
    return figure
