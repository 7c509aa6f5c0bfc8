"""Compare solvers: gaps along training runs, and the benefit of the exact direction."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.linalg import DEFAULT_MSIGN, msign
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import (
    ClosedForm,
    DualAscent,
    ProjectedPolar,
    Steepest,
    StiefelSolver,
)
from manifoldmuon.norms import Norm
from studies.baselines import ADMM, AlternatingProjection, FixedPoint
from studies.classification import (
    BATCH,
    MULTIPLIER,
    Given,
    digits,
    photographs,
    shapes_of,
    train,
    trajectory,
)
from studies.datasets import FlatImages
from studies.display import COLOURS, dress, panels, short, text_table
from studies.estimates import half_width, mean_estimate, shown
from studies.solver_gaps import solver_gaps
from studies.study import Cell, Record, Row, Study, option


@dataclasses.dataclass(frozen=True)
class NoProjection(StiefelSolver):
    """Negative control: `msign(G)`, the unconstrained direction; only the retraction constrains.

    It reports a correct residual, and NaN as its gap.
    """

    def solve(
        self,
        norm: Norm,
        at: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Any,
    ) -> Steepest:
        if at.shape[-2] < at.shape[-1]:
            answer = self.solve(norm, at.mT, grad.mT, dual)
            return answer._replace(direction=answer.direction.mT)
        direction = msign(grad, DEFAULT_MSIGN)
        along = at.mT @ direction
        along = along + along.mT
        residual = jnp.sqrt(jnp.sum(along**2, axis=(-2, -1))) / max(at.shape[-1], 1)
        return Steepest(direction, dual, residual, jnp.full_like(residual, jnp.nan))


EXACT = "exact"
"""The reference solver."""

SOLVERS: dict[str, StiefelSolver] = {
    EXACT: ClosedForm(),
    "one step": ProjectedPolar(),
    "alternating, 10": AlternatingProjection(steps=10),
    "dual ascent, 10": DualAscent(steps=10),
    "dual ascent, 100": DualAscent(steps=100),
    "fixed point, 3": FixedPoint(steps=3),
    "fixed point, 20": FixedPoint(steps=20),
    "ADMM, 3": ADMM(steps=3),
    "ADMM, 30": ADMM(steps=30),
    "no projection": NoProjection(),
}
"""The solvers by name and number of iterations."""

PLACES = (0.0, 0.25, 0.5, 1.0)  # positions of the windows in a run


@dataclasses.dataclass(frozen=True)
class SolverShootOut(Study):
    """How close do the Stiefel solvers come on real gradients, and does it pay to be exact?

    Every solver gets the same weights and momenta from training runs of a small classifier.
    Measures its gap to the optimum in float64 and its tangent residual, from a cold start and
    warm-started over the steps of a window. Then the classifier is trained with some of the
    solvers, with the same splits, weights and batches; differences from the exact direction are
    paired by seed, with Student's 95 % intervals.
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
            raise ValueError("rates and widths must be positive, and there must be a rate")

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
        found = train(data, geometry, self.widths, cell["rate"], self.steps, cell["seed"])
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
        """Estimate accuracy in percent and log loss: means and paired differences."""

        def values(name: str, key: str) -> np.ndarray:
            where = ("training", name, rate)
            here = [r for r in rows if (r["part"], r["solver"], r.get("rate")) == where]
            found = np.array([np.nan if r[key] is None else r[key] for r in here])
            return 100 * found if key == "accuracy" else np.log(found)

        found: dict[str, Any] = {}
        for key in ("accuracy", "loss"):
            mine, exact = values(solver, key), values(EXACT, key)
            label = "accuracy" if key == "accuracy" else "log_loss"
            found[label] = mean_estimate(mine.tolist())
            if solver != EXACT:
                found[f"{label}_minus_exact"] = mean_estimate((mine - exact).tolist())
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
            [f"{solver}, rate {rate}", shown(found["accuracy"], ".2f", " %"),
             shown(found.get("accuracy_minus_exact"), "+.2f"),
             shown(found.get("log_loss_minus_exact"), "+.3f")]
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
    """Return the windows of a run with the exact solver: by layer, window and step."""
    room = study.steps - study.window
    last = [study.window - 1 + int(share * room) for share in PLACES]
    wanted = {stop - back for stop in last for back in range(study.window)}
    data = images(study, seed)
    found = trajectory(
        data, study.widths, Stiefel(), 0.1, study.steps, BATCH, MULTIPLIER,
        seed, wanted,
    )  # fmt: skip
    return [
        [[found[stop - back][layer] for back in range(study.window)[::-1]] for stop in last]
        for layer in range(len(study.widths) + 1)
    ]


def stacked(windows: Sequence[Sequence[Given]]) -> tuple[np.ndarray, np.ndarray]:
    """Stack the points and gradients of a layer, `(steps, windows, m, n)`."""
    points = np.stack([[given.point for given in window] for window in windows], axis=1)
    return points, np.stack([[given.gradient for given in window] for window in windows], axis=1)


def images(study: SolverShootOut, seed: int) -> FlatImages:
    """Load the data for a seed; CIFAR-10 has the same split for all seeds."""
    return digits(seed) if study.data == "digits" else photographs(study.data_dir)


def picture(record: Record) -> Any:
    """Plot gaps along the runs, and differences from the exact direction."""
    settings, trained = record["settings"], record["summary"]["training"]
    figure, [(gap_panel, points, losses)] = panels(1, 3, width=5.2, height=4.2)
    _draw_gaps(gap_panel, [row for row in record["rows"] if row["part"] == "gap"])
    for panel, key, title, label in (
        (points, "accuracy_minus_exact", "Test accuracy", "points more than exact"),
        (losses, "log_loss_minus_exact", "Training loss", "log of the loss, minus exact"),
    ):
        others = [solver for solver in trained if solver != EXACT]
        for k, solver in enumerate(others):
            _draw(panel, k, solver, key, trained[solver])
        panel.axhline(0, color="#444444", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks(settings["rates"], [f"{rate:g}" for rate in settings["rates"]])
        panel.minorticks_off()
        if others:
            panel.legend(frameon=False)
        dress(panel, title, f"paired over {len(settings['seeds'])} seeds, 95 % intervals",
              "learning rate", label)  # fmt: skip
    return figure


def _draw(panel: Any, k: int, solver: str, key: str, by_rate: Mapping[str, Any]) -> None:
    found = [entry[key] for entry in by_rate.values()]
    values = np.array([np.nan if f["value"] is None else f["value"] for f in found])
    bars = [half_width(f["interval"]) or 0.0 for f in found]
    rates = np.array([float(rate) for rate in by_rate]) * 1.08 ** (k - 0.5)
    panel.errorbar(rates, values, bars, fmt="o", color=COLOURS[1 + k], capsize=3, label=solver)


def _draw_gaps(panel: Any, rows: Sequence[Row]) -> None:
    solvers = list(dict.fromkeys(row["solver"] for row in rows))[::-1]
    for k, (key, colour) in enumerate((("cold", COLOURS[0]), ("warm", COLOURS[3]))):
        for height, solver in enumerate(solvers):
            values = np.ravel([row[key] for row in rows if row["solver"] == solver])
            values = np.maximum(values, 1e-7)
            label = key if height == 0 else None
            y = height + 0.16 - 0.32 * k
            panel.plot(values, np.full(len(values), y), "o", color=colour, markersize=3, alpha=0.35)
            panel.plot(np.median(values), y, "|", color=colour, markersize=9, markeredgewidth=2.4,
                       label=label)  # fmt: skip
    panel.set_xscale("log")
    panel.set_yticks(range(len(solvers)), solvers)
    if solvers:
        panel.legend(frameon=False, title="start (bar: median)", loc="center left",
                     bbox_to_anchor=(0, 0.68))  # fmt: skip
    dress(panel, "Gap on real gradients", "a point for each layer, place and run",
          "relative gap to the optimum", "")  # fmt: skip
