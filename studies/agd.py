"""Automatic gradient descent against tuned Adam, on fully-connected networks of several depths."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import manifoldmuon as mm
from studies import datasets
from studies.classification import Weights, accuracy, logits, shapes_of
from studies.datasets import FlatImages, batches
from studies.display import BLUE, ORANGE, dress, panels, text_table
from studies.study import Cell, Record, Row, Study, option
from studies.training import begin, train

LAYOUT = mm.manifolds.Layout()
AGD = "agd"


@dataclasses.dataclass(frozen=True)
class AutomaticDescent(Study):
    """Does automatic gradient descent match tuned Adam, without a learning rate?

    Trains ReLU networks of several depths on the square loss, from the same semi-orthogonal weights
    and on the same batches, with automatic gradient descent and with Adam at several constant
    learning rates. The best of these is chosen by the final test accuracy that is reported.
    """

    name: ClassVar[str] = "agd"

    # fmt: off
    data: str = option("digits", "data set", choices=("digits", "mnist", "cifar10"))
    data_dir: Path | None = option(None, "folder with the data", recorded=False)
    width: int = option(64, "width of the hidden layers")
    depths: tuple[int, ...] = option((2, 4, 8, 16), "numbers of linear layers")
    epochs: int = option(400, "passes over the training images")
    batch_size: int = option(128, "images per update")
    learning_rates: tuple[float, ...] = option((1e-4, 3e-4, 1e-3, 3e-3), "learning rates of Adam")
    gain: float = option(1.0, "factor of the automatic step; 1 as published")
    seed: int = option(0, "seed of the split, the weights and the batches")
    # fmt: on

    def __post_init__(self):
        counts = (self.width, self.epochs, self.batch_size, *self.depths)
        if min(*counts, self.gain, *self.learning_rates) <= 0:
            raise ValueError(f"sizes, epochs, gain and learning_rates must be positive; got {self}")
        if not self.depths or not self.learning_rates:
            raise ValueError(f"depths and learning_rates must not be empty; got {self}")

    def cells(self) -> Sequence[Cell]:
        methods = [AGD, *(f"adam {rate:g}" for rate in self.learning_rates)]
        return [{"depth": depth, "method": method} for depth in self.depths for method in methods]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        """Train; curves are measured after 0, 1, ... epochs, `eta`, the mean automatic step length,
        in every epoch (empty for Adam)."""
        data = _load(self.data, self.data_dir, self.seed)
        automatic = cell["method"] == AGD
        rate = 0.0 if automatic else float(cell["method"].removeprefix("adam "))
        tx = mm.optim.agd(LAYOUT, self.gain) if automatic else optax.adam(rate)
        steps = len(data.train_y) // self.batch_size
        if not steps:
            raise ValueError(
                f"batch_size must be at most {len(data.train_y)}, the number of training images; "
                f"got {self.batch_size}"
            )
        order = batches(self.seed, len(data.train_y), steps * self.epochs, self.batch_size)
        shapes = shapes_of(data.widths((self.width,) * (cell["depth"] - 1)))
        templates = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        key = jax.random.key(self.seed)
        carry = begin(tx, mm.optim.init_semi_orthogonal(LAYOUT, key, templates))
        arrays = tuple(jnp.asarray(part) for part in data[:4])

        @jax.jit
        def epoch(carry: Any, images: Any, labels: Any, order: Any) -> Any:
            def loss(weights: Any, batch: Any) -> Any:
                return square_loss(weights, images[batch], labels[batch])

            carry, (_, eta) = train(tx, loss, carry, order, lambda _, state: _eta(state))
            return carry, None if eta is None else jnp.mean(eta)

        found: dict[str, list[float]] = {name: [] for name in (*_CURVES, "eta")}
        for number in range(self.epochs + 1):
            if number:
                rows = jnp.asarray(order[(number - 1) * steps : number * steps])
                carry, eta = epoch(carry, *arrays[:2], rows)
                found["eta"] += [] if eta is None else [float(eta)]
            for name, value in zip(_CURVES, _evaluate(carry[0], *arrays), strict=True):
                found[name].append(float(value))
        return found

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found = {}
        for depth in self.depths:
            ends = {
                row["method"]: {name: row[name][-1] for name in _CURVES}
                for row in rows
                if row["depth"] == depth
            }
            adams = [method for method in ends if method != AGD]
            best = max(adams, key=lambda method: ends[method]["test_accuracy"])
            found[str(depth)] = {"best_adam": best, AGD: ends[AGD], "adam": ends[best]}
        return found

    def table(self, record: Record) -> str:
        lines = [
            [f"{depth} layers, {found['best_adam'] if method == 'adam' else method}",
             f"{found[method]['train_loss']:.4f}",
             *(f"{100 * found[method][name]:.2f} %" for name in _CURVES[1:])]
            for depth, found in record["summary"].items()
            for method in (AGD, "adam")
        ]  # fmt: skip
        return text_table(["", "train loss", "train accuracy", "test accuracy"], lines)

    def plot(self, record: Record) -> Any:
        depths = dict.fromkeys((min(self.depths), max(self.depths)))
        figure, grid = panels(3, len(depths), width=3.6, height=2.4)
        for first, *others in grid:  # rows share an axis
            for panel in others:
                panel.sharey(first)
        for depth, (loss, accuracies, eta) in zip(depths, grid.T, strict=True):
            best = record["summary"][str(depth)]["best_adam"]
            for row in record["rows"]:
                if row["depth"] != depth:
                    continue
                style: dict[str, Any] = {"color": "#c9c9c9", "linewidth": 1}
                if row["method"] in (AGD, best):
                    colour = BLUE if row["method"] == AGD else ORANGE
                    style = {"color": colour, "linewidth": 2, "zorder": 3}
                loss.plot(row["train_loss"], **style)
                accuracies.plot([100 * x for x in row["test_accuracy"]], **style)
                eta.plot(range(1, len(row["eta"]) + 1), row["eta"], **style)
            loss.set_yscale("log")
            eta.set_yscale("log")
            dress(loss, f"depth {depth}", f"blue: AGD, orange: {best}", "", "training loss")
            accuracies.set_ylabel("test accuracy (%)")
            eta.set(xlabel="epoch", ylabel="step length")
        return figure


_CURVES = ("train_loss", "train_accuracy", "test_accuracy")


@functools.lru_cache(maxsize=1)
def _load(data: str, folder: Path | None, seed: int) -> FlatImages:
    """Load the images, each scaled to the sphere of radius `sqrt(pixels)`, as the method needs."""

    def unit(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        rms = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        return x / np.where(rms == 0, 1, rms)

    if data == "digits":
        found = datasets.load_digits(seed)
    else:
        found = (datasets.load_mnist if data == "mnist" else datasets.load_cifar10)(folder)
    flat = datasets.standardise(found)
    return flat._replace(train_x=unit(flat.train_x), test_x=unit(flat.test_x))


def square_loss(
    weights: Weights, images: Float[Array, "n d"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """Compute the batch mean of `|f - y|^2 / (2 classes)`; `y` is one-hot times `sqrt(classes)`."""
    outputs = logits(weights, images, 1.0)
    classes = outputs.shape[-1]
    targets = jax.nn.one_hot(labels, classes) * classes**0.5
    return jnp.mean((outputs - targets) ** 2) / 2


def _eta(state: Any) -> Any:
    return getattr(state[0], "eta", None)  # None for Adam


@jax.jit
def _evaluate(weights: Any, train_x: Any, train_y: Any, test_x: Any, test_y: Any) -> Any:
    loss = square_loss(weights, train_x, train_y)
    return loss, accuracy(weights, train_x, train_y), accuracy(weights, test_x, test_y)
