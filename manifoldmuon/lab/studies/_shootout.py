"""The solver shoot-out: gaps along real training runs, and whether the exact direction pays."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manifoldmuon.lab import _training
from manifoldmuon.lab._classifier import shapes_of
from manifoldmuon.lab._contestants import EXACT, SOLVERS, solver_gaps
from manifoldmuon.lab._figures import short, text_table
from manifoldmuon.lab._images import Data
from manifoldmuon.lab._intervals import mean, shown
from manifoldmuon.lab._study import Cell, Record, Row, Study, option
from manifoldmuon.lab._trajectory import Given, trajectory
from manifoldmuon.lab.studies._shootout_picture import picture
from manifoldmuon.manifolds import Stiefel

PLACES = (0.0, 0.25, 0.5, 1.0)  # where the windows lie in a run


@dataclasses.dataclass(frozen=True)
class SolverShootOut(Study):
    """How close do the Stiefel solvers come on real gradients, and does it pay to be exact?

    Along training runs of a small classifier every solver is given the same weights and momenta:
    its gap to the optimum in float64 and its tangent residual, from a cold start and after the
    seven steps before as a warm one. Then the classifier is trained with some of the solvers, the
    same splits, weights and batches for all of them: differences to the exact direction
    are taken seed by seed, with 95 % intervals of Student's distribution.
    """

    name: ClassVar[str] = "solvers"

    data: str = option("digits", "what is classified", choices=("digits", "cifar10"))
    data_dir: Path | None = option(None, "folder or archive of cifar10", recorded=False)
    solvers: tuple[str, ...] = option(tuple(SOLVERS), "along the runs", choices=tuple(SOLVERS))
    trained: tuple[str, ...] = option(
        (EXACT, "one step", "no projection"), "to train with", choices=tuple(SOLVERS)
    )
    widths: tuple[int, ...] = option((128, 64), "of the hidden layers")
    rates: tuple[float, ...] = option((0.03, 0.1, 0.3), "learning rates of the trainings")
    steps: int = option(200, "of each training; the rate falls linearly to zero")
    window: int = option(8, "steps of a warm start, the last included")
    runs: int = option(2, "how many of the seeds the solvers are followed along")
    seeds: tuple[int, ...] = option(tuple(range(8)), "splits, weights and batches")

    def __post_init__(self):
        if self.data_dir is not None and self.data == "digits":
            raise ValueError("data_dir is for cifar10; the digits ship inside scikit-learn")
        if self.window < 1 or self.steps < len(PLACES) * self.window:
            raise ValueError(
                f"steps must be at least {len(PLACES)} windows of 1 or more; got {self.steps} "
                f"steps and a window of {self.window}"
            )
        if not 0 <= self.runs <= len(self.seeds):
            raise ValueError(f"runs must lie between 0 and the {len(self.seeds)} seeds")
        if self.trained and EXACT not in self.trained:
            raise ValueError(f"trained must contain {EXACT!r}, with which all else is compared")
        if min(self.rates, default=0) <= 0 or min(self.widths, default=1) < 1:
            raise ValueError("rates and widths must be positive, and one rate there must be")

    def cells(self) -> Sequence[Cell]:
        followed: list[Cell] = [
            {"part": "gap", "solver": solver, "seed": seed}
            for seed in self.seeds[: self.runs]
            for solver in self.solvers
        ]
        trained = [
            {"part": "training", "solver": solver, "rate": rate, "seed": seed}
            for solver in self.trained
            for rate in self.rates
            for seed in self.seeds
        ]
        return followed + trained

    def run(self, cell: Cell) -> Mapping[str, Any]:
        solver = SOLVERS[cell["solver"]]
        if cell["part"] == "gap":
            layers = windows_of(self, cell["seed"])
            found = [solver_gaps(solver, *stacked(layer))._asdict() for layer in layers]
            shapes = [layer[0][0].point.shape for layer in layers]
            return {"shapes": shapes} | {key: [f[key] for f in found] for key in found[0]}
        data = images(self, cell["seed"])
        manifold = Stiefel(solver=solver)
        geometry = (manifold,) * len(shapes_of(data.widths(self.widths)))
        found = _training.train(data, geometry, self.widths, cell["rate"], self.steps, cell["seed"])
        return {"loss": found.loss, "accuracy": found.accuracy}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        summary: dict[str, Any] = {"gaps": {}, "training": {}}
        for solver in self.solvers:
            mine = [r for r in rows if (r["part"], r["solver"]) == ("gap", solver)]
            if mine:
                summary["gaps"][solver] = {
                    key: {"median": float(np.median(v)), "largest": float(np.max(v))}
                    for key in ("cold", "warm", "residual_cold", "residual_warm")
                    if len(v := np.ravel([r[key] for r in mine]))
                }
        for solver in self.trained:
            summary["training"][solver] = {
                f"{rate:g}": self._against_exact(rows, solver, rate) for rate in self.rates
            }
        return summary

    def _against_exact(self, rows: Sequence[Row], solver: str, rate: float) -> dict[str, Any]:
        """Accuracy in percent and the logarithm of the loss: means and paired differences."""

        def values(name: str, key: str) -> np.ndarray:
            where = ("training", name, rate)
            here = [r for r in rows if (r["part"], r["solver"], r.get("rate")) == where]
            found = np.array([np.nan if r[key] is None else r[key] for r in here])
            return 100 * found if key == "accuracy" else np.log(found)

        found: dict[str, Any] = {}
        for key in ("accuracy", "loss"):
            mine, exact = values(solver, key), values(EXACT, key)
            label = "accuracy" if key == "accuracy" else "log_loss"
            found[label] = mean(mine.tolist())
            if solver != EXACT:
                found[f"{label}_minus_exact"] = mean((mine - exact).tolist())
        return found

    def table(self, record: Record) -> str:
        summary = record["summary"]
        sizes = [(key, size) for key in ("cold", "warm") for size in ("median", "largest")]
        sizes += [("residual_cold", "median"), ("residual_warm", "median")]
        gap_lines = [
            [solver, *(short(found[key][size]) for key, size in sizes)]
            for solver, found in summary["gaps"].items()
        ]
        header = ["", "gap, cold", "largest", "gap, warm", "largest", "residual, cold", "warm"]
        train_lines = [
            [f"{solver}, rate {rate}", _with_reach(found["accuracy"], ".2f", " %"),
             _with_reach(found.get("accuracy_minus_exact"), "+.2f", ""),
             _with_reach(found.get("log_loss_minus_exact"), "+.3f", "")]
            for solver, rates in summary["training"].items()
            for rate, found in rates.items()
        ]  # fmt: skip
        trained = ["", "test accuracy", "minus exact, points", "log loss minus exact"]
        return "\n".join(
            [
                "medians over layers, places and runs:",
                text_table(header, gap_lines),
                f"\ntraining, mean and half of the 95 % interval over {len(self.seeds)} seeds:",
                text_table(trained, train_lines),
            ]
        )

    def plot(self, record: Record) -> Any:
        return picture(record)


@functools.lru_cache(maxsize=2)
def windows_of(study: SolverShootOut, seed: int) -> list[list[list[Given]]]:
    """For every layer the windows of one run, in order; the run is made with the exact solver."""
    room = study.steps - study.window
    last = [study.window - 1 + int(share * room) for share in PLACES]
    wanted = {stop - back for stop in last for back in range(study.window)}
    data = images(study, seed)
    found = trajectory(
        data, study.widths, Stiefel(), 0.1, study.steps, _training.BATCH, _training.MULTIPLIER,
        seed, wanted,
    )  # fmt: skip
    return [
        [[found[stop - back][layer] for back in range(study.window)[::-1]] for stop in last]
        for layer in range(len(study.widths) + 1)
    ]


def stacked(windows: Sequence[Sequence[Given]]) -> tuple[np.ndarray, np.ndarray]:
    """The points and gradients of one layer, `(steps, windows, m, n)`."""
    points = np.stack([[given.point for given in window] for window in windows], axis=1)
    return points, np.stack([[given.gradient for given in window] for window in windows], axis=1)


def images(study: SolverShootOut, seed: int) -> Data:
    """The data of a seed; CIFAR-10 has one split for all."""
    return (
        _training.digits(seed) if study.data == "digits" else _training.photographs(study.data_dir)
    )


def _with_reach(estimate: Mapping[str, Any] | None, form: str, unit: str) -> str:
    if estimate is None or estimate["value"] is None:
        return "-"
    return shown(estimate["value"], estimate["interval"], form) + unit
