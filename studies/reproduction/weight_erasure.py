"""Weight erasure: which method overwrites its initial weights, and which leaves them readable?"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import manifoldmuon as mm
from manifoldmuon.lab import erasure_auc, letter_mask, stable_rank
from manifoldmuon.linalg import MsignMethod, power_iteration
from studies.datasets import Dataset, load_cifar10
from studies.display import short, text_table
from studies.reproduction import modula
from studies.study import Cell, Record, Row, Study, option
from studies.training import begin, train

BATCH, CHUNK = 1024, 50
SAMPLED = 3072
"""Number of images, as published: the sampler confuses it with the number of pixels."""

RANK_STEPS = 10
"""Dualized steps before the second measurement of stable ranks."""

MIDDLE = 2
"""Index of the middle matrix among the parameters."""


@dataclasses.dataclass(frozen=True)
class WeightErasure(Study):
    """Which method overwrites its initial weights, and which leaves them readable?

    The middle matrix of an MLP is multiplied by a mask that is zero on the letter "a", and the
    network is trained on CIFAR-10. Dualized updates have a high stable rank and overwrite the
    letter; gradients scaled to the same spectral norm have rank one, and leave it.
    """

    name: ClassVar[str] = "weight-erasure"

    # fmt: off
    runs: tuple[str, ...] = option(
        ("dualized:0.5", "gradient:0.5", "dualized:2"),
        "METHOD:RATE[:all], dualized or gradient, with a learning rate; all: batches from the "
        f"whole training part, not from its first {SAMPLED} images")
    widths: tuple[int, ...] = option((32, 128, 1024), "widths at which stable ranks are measured")
    width: int = option(1024, "width of the runs")
    steps: int = option(1001, "steps of each run")
    data_dir: Path | None = option(None, "folder or archive of CIFAR-10", recorded=False)
    # fmt: on

    def __post_init__(self):
        if min(self.width, *self.widths, 8) < 8 or self.steps < 1:
            raise ValueError(
                "widths must be at least 8, so that a letter fits, and steps at least 1; got "
                f"{self.width}, {self.widths} and {self.steps}"
            )
        for run in self.runs:
            parsed(run)

    def cells(self) -> Sequence[Cell]:
        return [
            *({"part": "ranks", "width": width} for width in self.widths),
            *({"part": "run", "run": run} for run in self.runs),
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        dataset = _dataset(self.data_dir)
        if cell["part"] == "ranks":
            return stable_ranks(dataset, cell["width"])
        return curves(cell["run"], dataset, self.width, self.steps)

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            "runs": {
                row["run"]: {name: row[name][-1] for name in _ENDS}
                for row in rows
                if row["part"] == "run"
            },
            "stable_ranks": {
                str(row["width"]): {name: row[name][0] for name in RANKED}
                for row in rows
                if row["part"] == "ranks"
            },
        }

    def table(self, record: Record) -> str:
        lines = [
            [name, str(found["step"]), *(short(found[k], ".3f") for k in _ENDS[1:])]
            for name, found in record["summary"]["runs"].items()
        ]
        return text_table(["", "step", "training accuracy", "AUC", "ratio"], lines)


_ENDS = ("step", "train_accuracy", "auc", "ratio")


def parsed(run: str) -> tuple[str, float, bool]:
    """Parse a run's name, such as `dualized:0.5` or `dualized:0.5:all`.

    Raises:
      ValueError: it has another form.
    """
    method, _, rest = run.partition(":")
    rate, separator, everywhere = rest.partition(":")
    known = method in ("dualized", "gradient") and (not separator or everywhere == "all")
    if known and (number := float(rate)) > 0:
        return method, number, bool(separator)
    raise ValueError(f"runs must be dualized:RATE or gradient:RATE, :all may follow; got {run!r}")


@functools.lru_cache(maxsize=1)
def _dataset(folder: Path | None) -> Dataset:
    return load_cifar10(folder)


class Problem:
    """Network, masked initial weights and images (with values in [0, 1]).

    Attributes:
      network: 3072 - width - width - 10, with ReLUs.
      mask: mask of the middle matrix, zero on the letter.
      params: initial weights.
      train: flattened training images for the batches, and their classes.
      test: flattened test images, and their classes.
    """

    def __init__(self, dataset: Dataset, width: int, method: MsignMethod, sampled: int):
        def part(x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
            return jnp.asarray(x.reshape(len(x), -1)), jnp.asarray(y)

        self.train = part(dataset.train_x[:sampled], dataset.train_y[:sampled])
        self.test = part(dataset.test_x, dataset.test_y)
        self.classes = len(dataset.classes)
        self.network = modula.mlp(self.train[0].shape[1], width, self.classes, method)
        self.mask = letter_mask((width, width))
        params = modula.init(self.network, jax.random.key(0), method)
        masked = params[MIDDLE] * jnp.asarray(self.mask)
        self.params = (*params[:MIDDLE], masked, *params[MIDDLE + 1 :])
        self._accuracy = jax.jit(self.accuracy)

    def loss(self, params: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
        """Compute the mean square error of a batch."""
        images, labels = batch
        errors = self.network.apply(params, images)
        return jnp.mean((errors - jax.nn.one_hot(labels, self.classes)) ** 2)

    def batch(self, step: Any, train: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return the images of a step, drawn with replacement, and their classes."""
        key = jax.random.fold_in(jax.random.key(1), step)
        chosen = jax.random.choice(key, len(train[1]), (BATCH,))
        return train[0][chosen], train[1][chosen]

    def accuracy(self, params: Any, part: tuple[jax.Array, jax.Array]) -> Float[Array, ""]:
        """Return the share of images with the largest output at their class."""
        images, labels = part
        return jnp.mean(jnp.argmax(self.network.apply(params, images), axis=-1) == labels)

    def transformation(self, method: str, learning_rate: float) -> optax.GradientTransformation:
        """Return an optimizer with dualized gradients, or gradients of the same spectral norm."""
        if method == "dualized":
            return mm.optim.modular(learning_rate, self.network, momentum=None)
        return optax.chain(
            scale_by_spectral_norm(),
            mm.optim.scale_by_budget(self.network.budgets()),
            optax.scale_by_learning_rate(learning_rate),
        )

    def measure(self, params: Any, update: Any) -> dict[str, float | None]:
        """Return accuracies and what is left of the letter; `update` is the middle matrix's last
        update, or None."""
        weight = np.asarray(params[MIDDLE])
        alive = bool(np.isfinite(weight).all())
        return {
            "train_accuracy": float(self._accuracy(params, self.train)),
            "test_accuracy": float(self._accuracy(params, self.test)),
            "auc": erasure_auc(weight, self.mask) if alive else None,
            "ratio": erasure_ratio(weight, self.mask) if alive else None,
            "stable_rank": None if update is None else float(stable_rank(update)),
        }


def curves(run: str, dataset: Dataset, width: int, steps: int) -> dict[str, list[Any]]:
    """Train once; return the curves, with a point after every chunk of steps."""
    method, rate, everywhere = parsed(run)
    sampled = len(dataset.train_y) if everywhere else SAMPLED
    problem = Problem(dataset, width, modula.SIX_STEPS, sampled)
    tx = problem.transformation(method, rate)

    @jax.jit
    def chunk(carry: Any, steps: Any, images: Any) -> Any:
        def loss(params: Any, step: Any) -> Any:
            return problem.loss(params, problem.batch(step, images))

        before, last = steps[:-1], steps[-1:]
        carry, _ = train(tx, loss, carry, before)
        after, _ = train(tx, loss, carry, last)
        return after, after[0][MIDDLE] - carry[0][MIDDLE]

    carry = begin(tx, problem.params)
    points = [{"step": 0, **problem.measure(carry[0], None)}]
    for first in range(0, steps, CHUNK):
        these = np.arange(first, min(first + CHUNK, steps))
        carry, update = chunk(carry, these, problem.train)
        points.append({"step": first + len(these), **problem.measure(carry[0], update)})
    return {name: [point[name] for point in points] for name in points[0]}


def erasure_ratio(weight: Float[np.ndarray, "..."], mask: Float[np.ndarray, "..."]) -> float:
    """Return the RMS of the weights inside the letter divided by the RMS outside.

    0 right after masking, about 1 when the letter is gone; NaN if the weights outside are 0.
    """
    squares = np.square(weight, dtype=np.float64)
    outside = float(np.mean(squares[mask != 0]))
    return float(np.sqrt(np.mean(squares[mask == 0]) / outside)) if outside else float("nan")


def scale_by_spectral_norm() -> optax.GradientTransformation:
    """Scale gradients to RMS-to-RMS norm 1, keeping their singular vectors.

    Uses warm-started power iteration; the gradients have rank close to 1, and a single step is
    exact at rank 1.
    """

    def init_fn(params: Any) -> list[jax.Array]:
        return [jnp.zeros(w.shape[-1]) for w in jax.tree.leaves(params)]

    def update_fn(updates: Any, state: Any, params: Any = None):
        del params
        leaves, tree = jax.tree.flatten(updates)
        found = [power_iteration(g, v, steps=4) for g, v in zip(leaves, state, strict=True)]
        scaled = [
            g * (math.sqrt(g.shape[0] / g.shape[1]) / jnp.where(sigma == 0, 1, sigma))
            for g, (sigma, _) in zip(leaves, found, strict=True)
        ]
        return jax.tree.unflatten(tree, scaled), [vector for _, vector in found]

    return optax.GradientTransformation(init_fn, update_fn)


RANKED: dict[str, MsignMethod | None] = {
    "ten quintics": modula.TEN_QUINTICS,
    "six steps": modula.SIX_STEPS,
    "converged": None,
    "gradient": None,
}
"""Iterations that dualize the gradient; `gradient` is not dualized."""


def stable_ranks(dataset: Dataset, width: int) -> dict[str, list[float]]:
    """Return stable ranks of the middle matrix's update, before and after ten dualized steps of
    learning rate 1/2."""
    problem = Problem(dataset, width, modula.TEN_QUINTICS, SAMPLED)
    tx = problem.transformation("dualized", 0.5)

    @jax.jit
    def measure(params: Any, step: Any, images: Any) -> Any:
        grad = jax.grad(problem.loss)(params, problem.batch(step, images))[MIDDLE]
        made = {
            name: grad if name == "gradient" else mm.linalg.msign(grad, method)
            for name, method in RANKED.items()
        }
        return jax.tree.map(stable_rank, made)

    @jax.jit
    def advance(carry: Any, images: Any) -> Any:
        def loss(params: Any, step: Any) -> Any:
            return problem.loss(params, problem.batch(step, images))

        return train(tx, loss, carry, jnp.arange(RANK_STEPS))[0]

    carry = begin(tx, problem.params)
    first = measure(carry[0], 0, problem.train)
    carry = advance(carry, problem.train)
    last = measure(carry[0], RANK_STEPS, problem.train)
    return {name: [float(first[name]), float(last[name])] for name in RANKED}
