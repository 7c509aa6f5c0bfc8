"""Numbers from runs, for the table and the record."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from studies.digits.loop import Run
from studies.digits.methods import METHODS
from studies.digits.settings import Settings
from studies.estimates import Mean
from studies.records import environment


@dataclasses.dataclass(frozen=True)
class Row:
    """Results of an optimizer over all seeds; None for figures that it lacks.

    Attributes:
      label: name of the optimizer.
      test_accuracy: test accuracy in percent, after the last step.
      train_loss: loss on the whole training part, after the last step.
      distance: largest distance from the manifold over all steps, layers and seeds.
      residual: largest tangency residual over all steps, layers and seeds.
      gap: largest gap to the steepest direction over all steps, layers and seeds.
      milliseconds: time per step, median over the seeds.
      lipschitz: multiplier times the product of the layers' spectral norms, at the end.
    """

    label: str
    test_accuracy: Mean
    train_loss: Mean
    distance: float | None
    residual: float | None
    gap: float | None
    milliseconds: float
    lipschitz: Mean

    @classmethod
    def of(cls, optimizer: str, runs: Sequence[Run], multiplier: float) -> "Row":
        method = METHODS[optimizer]
        return cls(
            label=method.label,
            test_accuracy=Mean.of([100 * run.test_accuracy[-1] for run in runs]),
            train_loss=Mean.of([run.train_loss[-1] for run in runs]),
            distance=_largest([run.distance for run in runs]),
            residual=_largest([run.residual for run in runs]) if method.constrained else None,
            gap=_largest([run.gap for run in runs]),
            milliseconds=statistics.median(run.pace for run in runs),
            lipschitz=Mean.of([multiplier * run.spectral_product for run in runs]),
        )


def leads_over_adamw(runs: Mapping[str, Sequence[Run]]) -> dict[str, Mean]:
    """Return each optimizer's lead over AdamW in percentage points of test accuracy, by seed."""
    leads = {}
    for name in runs:
        if name != "adamw" and "adamw" in runs:
            pairs = zip(runs[name], runs["adamw"], strict=True)
            leads[name] = Mean.of(
                [100 * (a.test_accuracy[-1] - b.test_accuracy[-1]) for a, b in pairs]
            )
    return leads


def summarise(settings: Settings, runs: Mapping[str, Sequence[Run]]) -> dict[str, Row]:
    """Return a row for each optimizer."""
    return {name: Row.of(name, found, settings.multiplier) for name, found in runs.items()}


def as_record(
    settings: Settings,
    widths: Sequence[int],
    runs: Mapping[str, Sequence[Run]],
    compile_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the full record: settings, versions, tables and curves."""
    rows = summarise(settings, runs)
    return {
        "settings": settings.as_record(),
        "layers": list(widths),
        "environment": environment(),
        "summary": {name: dataclasses.asdict(row) for name, row in rows.items()},
        "lead_over_adamw": {k: dataclasses.asdict(v) for k, v in leads_over_adamw(runs).items()},
        "compile_seconds": dict(compile_seconds),
        "runs": {
            name: [
                {"seed": seed, "spectral_product": run.spectral_product} | dataclasses.asdict(run)
                for seed, run in zip(settings.seeds, found, strict=True)
            ]
            for name, found in runs.items()
        },
    }


def _largest(curves: Sequence[Sequence[float]]) -> float | None:
    """Return the largest number in all curves, NaN if there is any, None if there are none."""
    numbers = [number for curve in curves for number in curve]
    if any(math.isnan(number) for number in numbers):
        return math.nan
    return max(numbers, default=None)
