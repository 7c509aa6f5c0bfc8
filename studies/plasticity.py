"""Plasticity: which recipe still learns after a long stream of tasks?"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import FanRatio, RMSToRMS
from manifoldmuon.optim import chain, hyperball, manifold_muon, scale_by_steepest
from studies.classification import digits
from studies.datasets import FlatImages, batches, load_mnist, standardise
from studies.display import COLOURS, dress, panels, text_table
from studies.estimates import at_best_rate, estimate, shown
from studies.study import Cell, Record, Row, Study, check_choices, check_rival, option

BATCH = 32
IMAGES = 1437
HEAD_RATE = 2.0**-8
"""The learning rate of Adam for the last layer."""

RIVAL = "Muon, decay 1"
"""Muon with its best weight decay."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How to train the hidden matrices.

    Attributes:
      make: returns the optimizer for a rate.
      centre: log2 of the central rate of the grid.
      factor: of each matrix in the network; scales the norm that a constrained matrix keeps.
    """

    make: Callable[[Any], optax.GradientTransformation]
    centre: int
    factor: float = 1.0


def _free(base: Callable[[], Any], centre: int, decay: float) -> Method:
    def make(rate: Any) -> optax.GradientTransformation:
        decayed = optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
        return optax.chain(base(), *decayed)

    return Method(make, centre)


def _muon() -> optax.GradientTransformation:
    flat = Euclidean(RMSToRMS(TRAINING_MSIGN))
    return chain(optax.trace(0.9, nesterov=True), scale_by_steepest(flat, track_gap=False))


def _adam() -> optax.GradientTransformation:
    return optax.scale_by_adam(0.9, 0.95)


METHODS: dict[str, Method] = {
    "Adam": _free(_adam, -9, 0.0),
    "AdamW, decay 1": _free(_adam, -8, 1.0),
    "AdamW, decay 3": _free(_adam, -8, 3.0),
    "Muon": _free(_muon, -6, 0.0),
    "Muon, decay 0.3": _free(_muon, -4, 0.3),
    RIVAL: _free(_muon, -5, 1.0),
    "Muon, decay 3": _free(_muon, -5, 3.0),
    "AdamH": Method(lambda rate: hyperball(_adam(), rate, Hypersphere(ndim=2)), -8),
    "MuonH": Method(lambda rate: hyperball(_muon(), rate, Hypersphere(ndim=2)), -4),
    "rows": Method(lambda rate: hyperball(_muon(), rate, Hypersphere()), -4),
    "Stiefel": Method(
        lambda rate: manifold_muon(rate, Stiefel(FanRatio()).for_training(), 0.9, track_gap=False),
        -4,
    ),
}
"""Decay is multiplied by the rate. `Stiefel` projects its initial weights onto the manifold."""

FACTORS = {RIVAL: 1.4, "MuonH": 0.7, "rows": 0.7}
"""Best factors for 40 tasks of seeds 10 and 11, among 0.5, 0.7 and 1 (rival: 0.7, 1 and 1.4)."""
METHODS |= {
    f"{name}, times {factor}": dataclasses.replace(METHODS[name], factor=factor)
    for name, factor in FACTORS.items()
}

CONSTRAINED = "AdamH", "MuonH", "rows", "Stiefel", "MuonH, times 0.7", "rows, times 0.7"


def _scores(
    weights: dict[str, Any], x: Float[Array, "n d"], factor: float
) -> tuple[Array, list[Array]]:
    active = []
    for matrix in weights["hidden"]:
        x = jax.nn.relu(x @ matrix.T)
        active.append(x > 0)
        x = factor * np.sqrt(2) * x
    return x @ weights["head"].T, active


@functools.lru_cache(maxsize=2)
def _program(name: str) -> Any:
    """Return a compiled program that trains on a whole stream, for all rates at once."""
    method = METHODS[name]

    @jax.jit
    def run(start: Any, images: Any, labels: Any, order: Any, pixels: Any, rates: Any) -> Any:
        def train(rate: Any) -> Any:
            tx, adam = method.make(rate), optax.adam(HEAD_RATE, 0.9, 0.95)

            def loss(weights: Any, x: Any, y: Any) -> Any:
                scores, _ = _scores(weights, x, method.factor)
                return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

            def task(carry: Any, own: Any) -> Any:
                rows, moved = own

                def step(carry: Any, rows: Any) -> Any:
                    weights, state, rest = carry
                    x, y = images[rows][:, moved], labels[rows]
                    found, grads = jax.value_and_grad(loss)(weights, x, y)
                    hidden, state = tx.update(grads["hidden"], state, weights["hidden"])
                    head, rest = adam.update(grads["head"], rest)
                    weights = optax.apply_updates(weights, {"hidden": hidden, "head": head})
                    return (weights, state, rest), found

                carry, losses = jax.lax.scan(step, carry, rows)
                return carry, losses.mean()

            carry = start, tx.init(start["hidden"]), adam.init(start["head"])
            (weights, *_), losses = jax.lax.scan(task, carry, (order, pixels))
            _, active = _scores(weights, images[:, pixels[-1]], method.factor)
            dead = jnp.mean(jnp.stack([jnp.all(~part, axis=0).mean() for part in active]))
            return losses, dead

        return jax.vmap(train)(rates)

    return run


@functools.lru_cache(maxsize=1)
def _mnist(folder: Path | None, seed: int) -> FlatImages:
    """Draw as many of MNIST's training images as scikit-learn's digits have."""
    data = standardise(load_mnist(folder))
    rows = np.random.default_rng(seed).permutation(len(data.train_y))[:IMAGES]
    return data._replace(train_x=data.train_x[rows], train_y=data.train_y[rows])


@dataclasses.dataclass(frozen=True)
class Plasticity(Study):
    """Which recipe still learns after a long stream of tasks?

    A ReLU network without biases classifies digits, scikit-learn's or as many of MNIST's, with a
    new permutation of the pixels in every task. A task shows each image once; nothing is reset.
    Each method trains the hidden matrices at a constant rate, Adam trains the head. The loss is
    measured on each batch before its update. The rate for the loss over the whole stream is chosen
    for each seed by the other seeds. Differences from Muon with weight decay are paired by seed.
    """

    name: ClassVar[str] = "plasticity"

    # fmt: off
    methods: tuple[str, ...] = option(
        tuple(METHODS), f"methods for the hidden matrices, {RIVAL!r} among them",
        choices=tuple(METHODS))
    images: str = option("digits", "data set", choices=("digits", "mnist"))
    data_dir: Path | None = option(None, "folder with MNIST", recorded=False)
    tasks: int = option(80, "number of permutations, one after the other")
    parts: int = option(10, "parts of the stream with a mean loss each")
    octaves: tuple[int, ...] = option(
        (-2, -1, 0, 1, 2), "rates to try, in octaves from each method's own")
    width: int = option(64, "width of the hidden layers")
    depth: int = option(3, "number of hidden layers")
    seeds: tuple[int, ...] = option(
        (0, 1, 2, 3, 4), "seeds of images, permutations, weights and batches")
    # fmt: on

    def __post_init__(self):
        check_choices(self)
        check_rival(RIVAL, self.methods, self.seeds)
        if min(self.tasks, self.parts, self.width, self.depth) < 1 or self.tasks % self.parts:
            raise ValueError(
                "tasks, parts, width and depth must be at least 1, and parts divide tasks; got "
                f"{self.tasks}, {self.parts}, {self.width} and {self.depth}"
            )

    def cells(self) -> Sequence[Cell]:
        return [{"method": method, "seed": seed} for method in self.methods for seed in self.seeds]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        method, seed = cell["method"], cell["seed"]
        data = digits(seed) if self.images == "digits" else _mnist(self.data_dir, seed)
        count, features = data.train_x.shape
        steps = count // BATCH
        rng = np.random.default_rng(seed)
        pixels = np.stack([rng.permutation(features) for _ in range(self.tasks)])
        order = [batches(1000 * seed + task, count, steps, BATCH) for task in range(self.tasks)]
        start = self._start(method, seed, features, data.classes)
        exponents = [METHODS[method].centre + octave for octave in self.octaves]
        rates = 2.0 ** jnp.array(exponents, jnp.float32)
        arrays = (jnp.asarray(x) for x in (data.train_x, data.train_y, np.stack(order), pixels))
        losses, dead = _program(method)(start, *arrays, rates)
        parts = np.asarray(losses, np.float64).reshape(len(exponents), self.parts, -1).mean(axis=2)
        return {"log2_rates": exponents, "losses": parts, "dead": dead}

    def _start(self, method: str, seed: int, features: int, classes: int) -> dict[str, Any]:
        widths = [features, *[self.width] * self.depth]
        keys = jax.random.split(jax.random.key(seed), self.depth)
        hidden = [
            jax.random.normal(key, (after, before)) / np.sqrt(before)
            for key, before, after in zip(keys, widths[:-1], widths[1:], strict=True)
        ]
        if method == "Stiefel":
            hidden = [Stiefel(FanRatio()).project(matrix) for matrix in hidden]
        return {"hidden": hidden, "head": jnp.zeros((classes, self.width))}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return summary(rows)

    def table(self, record: Record) -> str:
        keys = {
            "all": ".3f",
            "last": ".3f",
            "change": "+.3f",
            "last_over_rival": "+.3f",
            "dead": ".1%",
        }
        lines = [
            [name, f"2^{found['log2_rate']}", *(shown(found[key], keys[key]) for key in keys)]
            for name, found in record["summary"].items()
        ]
        header = [
            "",
            "rate",
            "loss, all",
            "last part",
            "less the second",
            f"beyond {RIVAL}",
            "dead",
        ]
        return text_table(header, lines)

    def plot(self, record: Record) -> Any:
        figure, grid = panels(1, 1, width=7.2, height=4.0)
        each = record["settings"]["tasks"] // record["settings"]["parts"]
        colours: dict[str, str] = {}
        for name, found in record["summary"].items():
            base, _, factor = name.partition(", times ")
            colour = colours.setdefault(base, (COLOURS * 2)[len(colours)])
            x = [each * (part + 1) for part in range(len(found["by_part"]))]
            line = "o-" if name in CONSTRAINED else "s--"
            line = f"{line[0]}:" if factor else line
            grid[0, 0].plot(x, found["by_part"], line, color=colour, markersize=3, label=name)
        figure.legend(loc="outside right center", fontsize=8, frameon=False)
        images = {"digits": "digits", "mnist": "MNIST"}[record["settings"].get("images", "digits")]
        dress(grid[0, 0], f"Permuted {images}, one task after the other",
              "each method at its best rate, mean over seeds", "tasks so far",
              "loss on images seen for the first time")  # fmt: skip
        return figure


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise each method at its best rate: losses over the stream, by part, and at the end."""
    found: dict[str, Any] = {}
    whole: dict[str, np.ndarray] = {}
    last: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        losses = np.array([row["losses"] for row in own], np.float64)  # seeds, rates, parts
        values, at = at_best_rate(losses.mean(axis=2))
        best = losses[:, at]
        whole[name], last[name] = np.array(values, np.float64), best[:, -1]
        found[name] = {
            "log2_rate": own[0]["log2_rates"][at],
            "edge": at in (0, losses.shape[1] - 1),
            "all": estimate(values),
            "last": estimate(best[:, -1]),
            "change": estimate(best[:, -1] - best[:, min(1, best.shape[1] - 1)]),
            "by_part": best.mean(axis=0).tolist(),
            "dead": estimate([row["dead"][at] for row in own]),
        }
    for name, own in found.items():
        own["all_over_rival"] = estimate(whole[name] - whole[RIVAL])
        own["last_over_rival"] = estimate(last[name] - last[RIVAL])
    return found
