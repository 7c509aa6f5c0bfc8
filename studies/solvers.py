"""Compare solvers in training: the benefit of the exact direction."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optax

from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from manifoldmuon.norms import Spectral
from manifoldmuon.optim import chain, manifold_muon, retract, scale_by_steepest
from studies import classification
from studies.display import COLOURS, dress, legend_above, panels, text_table
from studies.estimates import half_width, mean_estimate, shown
from studies.study import Cell, Record, Row, Study, option

EXACT = "ClosedForm"
"""The reference."""


def _no_projection(rate: Any) -> optax.GradientTransformation:
    """Return the unconstrained direction; only the retraction constrains."""
    return chain(
        optax.trace(0.95, nesterov=True),
        scale_by_steepest(Euclidean(Spectral())),
        optax.scale_by_learning_rate(rate),
        retract(Stiefel()),
    )


SOLVERS: dict[str, Any] = {
    EXACT: lambda rate: manifold_muon(rate, Stiefel(solver=ClosedForm())),
    "ProjectedPolar": lambda rate: manifold_muon(rate, Stiefel(solver=ProjectedPolar())),
    "no projection": _no_projection,
}


@dataclasses.dataclass(frozen=True)
class SolverShootOut(Study):
    """Does it pay to be exact in the direction on the Stiefel manifold?

    Trains a small classifier with the closed form, with one projected sign, and with the
    unconstrained direction, with the same splits, weights and batches. Differences from the exact
    direction are paired by seed, with Student's 95 % intervals.
    """

    name: ClassVar[str] = "solvers"

    data: str = option("digits", "data set", choices=("digits", "cifar10"))
    data_dir: Path | None = option(None, "folder or archive of CIFAR-10", recorded=False)
    solvers: tuple[str, ...] = option(
        tuple(SOLVERS), "solvers to train with", choices=tuple(SOLVERS)
    )
    widths: tuple[int, ...] = option((128, 64), "widths of the hidden layers")
    rates: tuple[float, ...] = option((0.03, 0.1, 0.3), "learning rates")
    steps: int = option(200, "steps of each training; the rate falls linearly to zero")
    seeds: tuple[int, ...] = option(tuple(range(8)), "seeds of splits, weights and batches")

    def __post_init__(self):
        if EXACT not in self.solvers:
            raise ValueError(f"solvers must contain {EXACT!r}, the baseline; got {self.solvers}")
        if min(self.rates, default=0) <= 0 or min(self.steps, *self.widths, 1) < 1:
            raise ValueError(
                f"rates, widths and steps must be positive, rates not empty; got {self}"
            )

    def cells(self) -> Sequence[Cell]:
        return [
            {"solver": solver, "rate": rate, "seed": seed}
            for solver in self.solvers
            for rate in self.rates
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        seed, digits = cell["seed"], self.data == "digits"
        data = classification.digits(seed) if digits else classification.cifar10(self.data_dir)
        weights = classification.init_weights(
            seed, classification.shapes_of(data.widths(self.widths))
        )
        build = SOLVERS[cell["solver"]]
        weights = classification.train(data, build, weights, cell["rate"], self.steps, seed)
        loss, accuracy = classification.evaluate(weights, data)
        return {"loss": loss, "accuracy": accuracy}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {
            solver: {f"{rate:g}": self._against_exact(rows, solver, rate) for rate in self.rates}
            for solver in self.solvers
        }

    def _against_exact(self, rows: Sequence[Row], solver: str, rate: float) -> dict[str, Any]:
        """Estimate accuracy in percent and log loss: means and paired differences."""

        def values(name: str, key: str) -> np.ndarray:
            here = [row[key] for row in rows if (row["solver"], row["rate"]) == (name, rate)]
            found = np.array(here, np.float64)
            return 100 * found if key == "accuracy" else np.log(found)

        found: dict[str, Any] = {}
        for key, label in (("accuracy", "accuracy"), ("loss", "log_loss")):
            mine, exact = values(solver, key), values(EXACT, key)
            found[label] = mean_estimate(mine.tolist())._asdict()
            if solver != EXACT:
                found[f"{label}_minus_exact"] = mean_estimate((mine - exact).tolist())._asdict()
        return found

    def table(self, record: Record) -> str:
        lines = [
            [f"{solver}, rate {rate}", shown(found["accuracy"], ".2f", " %"),
             shown(found.get("accuracy_minus_exact"), "+.2f"),
             shown(found.get("log_loss_minus_exact"), "+.3f")]
            for solver, rates in record["summary"].items()
            for rate, found in rates.items()
        ]  # fmt: skip
        header = ["", "test accuracy", f"minus {EXACT}, points", f"log loss minus {EXACT}"]
        return text_table(header, lines)

    def plot(self, record: Record) -> Any:
        figure, [(points, losses)] = panels(1, 2, width=5.2, height=4.2)
        rates, seeds = record["settings"]["rates"], record["settings"]["seeds"]
        others = [solver for solver in record["summary"] if solver != EXACT]
        for panel, key, title, label in (
            (points, "accuracy_minus_exact", "Test accuracy", f"points more than {EXACT}"),
            (losses, "log_loss_minus_exact", "Training loss", f"log loss, minus {EXACT}"),
        ):
            for k, solver in enumerate(others):
                found = [entry[key] for entry in record["summary"][solver].values()]
                values = [np.nan if f["value"] is None else f["value"] for f in found]
                bars = [half_width(f["interval"]) or 0.0 for f in found]
                panel.errorbar(np.array(rates) * 1.08 ** (k - 0.5), values, bars, fmt="o",
                               color=COLOURS[k], capsize=3, label=solver)  # fmt: skip
            panel.axhline(0, color="#444444", linewidth=1)
            panel.set_xscale("log")
            panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
            panel.minorticks_off()
            dress(panel, title, f"paired over {len(seeds)} seeds, 95 % intervals",
                  "learning rate", label)  # fmt: skip
        legend_above(figure, points)
        return figure
