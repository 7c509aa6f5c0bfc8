"""The main job: settings, summary and table."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from studies import datasets
from studies.digits.figure import picture
from studies.digits.methods import METHODS, SOLVERS
from studies.digits.training import curves
from studies.display import short, text_table
from studies.estimates import estimate, shown
from studies.study import Cell, Record, Row, Study, option

_LOADERS = {"mnist": datasets.load_mnist, "cifar10": datasets.load_cifar10}

_LEGEND = """\
distance   the largest |singular value / target - 1| of any layer after any step (on a sphere: of
           the norm); residual, how far a direction was from tangent before its last projection
gap        how far a direction may be from steepest, at most; the largest of any step
Lipschitz  bound of the network at the end: its multiplier times the product of spectral norms"""


@dataclasses.dataclass(frozen=True)
class Digits(Study):
    """How do AdamW, Muon, hypersphere descent and manifold Muon compare on the digits?

    Trains a ReLU network with every optimizer, side by side, from the same weights and on the same
    batches; learning rates fall linearly to zero. Measures loss and accuracy, singular values,
    distances from the manifolds, gaps of the directions, and the time of a step.
    """

    name: ClassVar[str] = "digits"

    # fmt: off
    data: str = option("digits", "data set; digits needs no download",
                       choices=("digits", *_LOADERS))
    data_dir: Path | None = option(
        None, "folder with the files of mnist or cifar10; left out: download", recorded=False)
    widths: tuple[int, ...] = option((128, 64), "widths of the hidden layers")
    steps: int = option(500, "number of updates")
    batch_size: int = option(128, "images per update")
    optimizers: tuple[str, ...] = option(
        tuple(METHODS), "optimizers to compare", choices=tuple(METHODS))
    learning_rates: tuple[float, ...] = option(
        (), "peak rates, one for each optimizer; left out: the tuned ones, "
        + ", ".join(f"{name} {method.learning_rate:g}" for name, method in METHODS.items()))
    seeds: tuple[int, ...] = option(
        tuple(range(8)), "seeds of the split, the weights and the batches")
    solver: str = option("ClosedForm", "solver of manifold Muon", choices=tuple(SOLVERS))
    multiplier: float = option(
        4.0, "factor of the last layer: the Lipschitz bound of a network on Stiefel manifolds")
    # fmt: on

    def __post_init__(self):
        for name in ("optimizers", "seeds"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ValueError(f"{name} must be different, and not empty; got {given}")
        if min(self.steps, self.batch_size, *self.widths) < 1 or self.multiplier <= 0:
            raise ValueError(f"sizes, steps and multiplier must be positive; got {self}")
        rates = self.learning_rates
        if rates and (len(rates) != len(self.optimizers) or min(rates) <= 0):
            raise ValueError(
                f"learning_rates must be positive, and as many as optimizers; got {rates} for "
                f"{', '.join(self.optimizers)}"
            )
        if self.data == "digits" and self.data_dir is not None:
            raise ValueError(f"data_dir is for mnist and cifar10; got {self.data_dir} for digits")

    def learning_rate(self, optimizer: str) -> float:
        """Return the peak rate of an optimizer: the given rate, or else the tuned rate."""
        given = dict(zip(self.optimizers, self.learning_rates, strict=False))
        return given.get(optimizer, METHODS[optimizer].learning_rate)

    def load(self, seed: int) -> datasets.FlatImages:
        """Load the data set; for the digits, with the split of this seed."""
        found = _load(self.data, self.data_dir, seed if self.data == "digits" else 0)
        if self.batch_size > len(found.train_y):
            raise ValueError(
                f"batch_size must be at most {len(found.train_y)}, the number of training images; "
                f"got {self.batch_size}"
            )
        return found

    def cells(self) -> Sequence[Cell]:
        return [
            {"optimizer": name, "seed": seed} for name in self.optimizers for seed in self.seeds
        ]

    def timed(self, cell: Cell) -> bool:
        return True

    def run(self, cell: Cell) -> Mapping[str, Any]:
        return curves(self, cell["optimizer"], cell["seed"])

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        own = {name: [row for row in rows if row["optimizer"] == name] for name in self.optimizers}
        return {name: self._summary(name, found, own.get("adamw")) for name, found in own.items()}

    def _summary(
        self, name: str, runs: Sequence[Row], adamw: Sequence[Row] | None
    ) -> dict[str, Any]:
        """Summarise an optimizer; None for figures that it lacks.

        Accuracies are in percent; distance, residual and gap are the largest over all steps,
        layers and seeds, milliseconds per step the median, without the first chunk (warm-up).
        """
        accuracies = [100 * run["test_accuracy"][-1] for run in runs]
        products = [math.prod(map(_number, run["spectral_norms"])) for run in runs]
        pace = [statistics.median(run["milliseconds"][1:] or run["milliseconds"]) for run in runs]
        lead = None
        if adamw is not None and name != "adamw":
            theirs = [100 * run["test_accuracy"][-1] for run in adamw]
            lead = estimate([a - b for a, b in zip(accuracies, theirs, strict=True)])
        return {
            "label": METHODS[name].label,
            "test_accuracy": estimate(accuracies),
            "train_loss": estimate([run["train_loss"][-1] for run in runs]),
            "distance": _largest(runs, "distance"),
            "residual": _largest(runs, "residual") if METHODS[name].constrained else None,
            "gap": _largest(runs, "gap"),
            "milliseconds": statistics.median(pace),
            "lipschitz": estimate([self.multiplier * product for product in products]),
            "lead_over_adamw": lead,
        }

    def table(self, record: Record) -> str:
        lines = [
            [
                row["label"],
                shown(row["test_accuracy"], ".2f", " %"),
                f"{_number(row['train_loss']['mean']):.1e}",
                *(short(row[name]) for name in ("distance", "residual", "gap")),
                f"{row['milliseconds']:.2f}",
                f"{_number(row['lipschitz']['mean']):.4g}",
            ]
            for row in record["summary"].values()
        ]
        header = ["", "test accuracy", "train loss", "distance", "residual", "gap", "ms/step",
                  "Lipschitz"]  # fmt: skip
        seeds = len(self.seeds)
        count = f"{seeds} seeds, mean and 95 % interval" if seeds > 1 else "one seed"
        title = f"{self.data}, {self.steps} steps of {self.batch_size} images, {count}"
        leads = [
            f"{row['label']} beyond AdamW in test accuracy, paired by seed: "
            f"{shown(lead, '+.2f')} points"
            for row in record["summary"].values()
            if (lead := row["lead_over_adamw"])
        ]
        return "\n".join([title, text_table(header, lines), _LEGEND, *leads])

    def plot(self, record: Record) -> Any:
        return picture(record)


@functools.lru_cache(maxsize=4)
def _load(data: str, folder: Path | None, seed: int) -> datasets.FlatImages:
    return datasets.standardise(
        datasets.load_digits(seed) if data == "digits" else _LOADERS[data](folder)
    )


def _number(value: float | None) -> float:
    """Return a number of a record; NaN for None."""
    return math.nan if value is None else value


def _largest(runs: Sequence[Row], curve: str) -> float | None:
    """Return the largest number in the curves, NaN if there is any, None if there are none."""
    numbers = [_number(value) for run in runs for value in run[curve]]
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=None)
