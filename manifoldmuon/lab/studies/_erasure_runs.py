"""Runs of the study of weight erasure: half-lives, means over seeds and their intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from manifoldmuon.lab._intervals import mean
from manifoldmuon.lab._study import Row

# Published by eye; a sharp letter has an AUC of 1, none 0.5.
READABLE, HALF, GONE, NO_LETTER = 0.9, 0.75, 0.6, 0.5

ENDS = ("train_accuracy", "test_accuracy", "auc", "ratio", "update_rank", "distance")
"""What is told of the end of a run."""

Runs = Mapping[tuple[str, float], Mapping[int, Row]]
"""By method and learning rate, the row of every seed."""


def estimate(values: Sequence[float | None]) -> dict[str, Any]:
    """`mean`, and `interval`, its 95 % interval of Student's distribution.

    Both are None if a value is missing; the interval is, too, if there is but one value.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "interval": None}
    found = mean(known)
    return {"mean": found.value, "interval": found.interval}


def by_seed(rows: Sequence[Row]) -> Runs:
    """The rows of runs, in their order."""
    found: dict[tuple[str, float], dict[int, Row]] = {}
    for row in rows:
        if row["part"] == "run":
            found.setdefault((row["method"], row["rate"]), {})[row["seed"]] = row
    return found


def ends(runs: Runs) -> list[dict[str, Any]]:
    """What the runs come to: estimates over the seeds."""
    return [
        {"method": method, "rate": rate, "seeds": len(seeds)}
        | {what: estimate([row[what][-1] for row in seeds.values()]) for what in ENDS}
        | {"start_auc": estimate([row["auc"][0] for row in seeds.values()])}
        | {"half_life": estimate([half_life_of(row) for row in seeds.values()])}
        for (method, rate), seeds in runs.items()
    ]


def half_life_of(row: Row) -> float | None:
    """That of the letter of a run."""
    return half_life(row["step"], row["auc"])


def half_life(steps: Sequence[int], auc: Sequence[float | None]) -> float | None:
    """The step at which the AUC has come down to 0.75, on a logarithmic scale between two
    measurements; None if it never did, or the weights are not finite."""
    if any(value is None for value in auc):
        return None
    values = [float(value) for value in auc if value is not None]
    below = next((i for i, value in enumerate(values) if value <= HALF), None)
    if not below:
        return None if below is None else 0.0
    share = (values[below - 1] - HALF) / (values[below - 1] - values[below])
    before, after = (math.log1p(steps[i]) for i in (below - 1, below))
    return math.expm1(before + share * (after - before))
