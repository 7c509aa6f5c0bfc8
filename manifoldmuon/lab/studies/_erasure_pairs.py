"""What a constraint does to weight erasure: methods and their twins, paired by seed."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._study import Row
from manifoldmuon.lab.studies._erasure_methods import twin_of
from manifoldmuon.lab.studies._erasure_runs import GONE, HALF, Runs, estimate, half_life_of

Pairs = Mapping[int, tuple[Row, Row]]
"""By seed, which is the same start and the same batches, the method's row and its twin's."""

SHOWN = ("auc", "half_life", "train_accuracy", "test_accuracy")


def constraints(runs: Runs, ends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every constrained run beside its twin in flat space.

    Returns:
      For each method and rate `speedup`, the half-life of the twin over that of the method, and
      `auc_difference`, the AUC of the method less that of the twin; the mean of `speedup` is the
      geometric one. Beside them the means of both (`twin_` before those of the twin).
    """
    end = {(one["method"], one["rate"]): one for one in ends}
    return [
        {"method": method, "twin": twin, "rate": rate, "seeds": len(paired)}
        | {
            "speedup": _exp(estimate(list(_over(paired, log_speedup).values()))),
            "auc_difference": estimate(list(_over(paired, auc_difference).values())),
        }
        | {what: end[method, rate][what] for what in SHOWN}
        | {f"twin_{what}": end[twin, rate][what] for what in SHOWN}
        for method, twin, rate, paired in _paired(runs)
    ]


def answer(runs: Runs, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Does the constraint speed erasure up or prevent it? For each constrained method.

    `speedup` is how many times sooner the AUC is at 0.75 than that of the twin: per seed the
    geometric mean over `rates`, those at which both come there with every seed, then the
    geometric mean over the seeds and its interval. It speeds erasure up if the whole interval
    lies above 1, and slows it down if it lies below. One seed has no interval and decides
    nothing: None. `auc_difference` is taken likewise, over the rates at which no run was lost.
    Erasure is prevented where the twin's letter is gone at the end, in the mean over the seeds,
    and the method's has an AUC above 0.75.
    """
    end = {(one["method"], one["rate"]): one["auc"]["mean"] for one in ends}
    found = {}
    for method, group in itertools.groupby(_paired(runs), lambda pair: pair[0]):
        pairs = list(group)
        twin = pairs[0][1]
        by_rate = {rate: paired for _, _, rate, paired in pairs}
        speedup, rates = _over_rates(by_rate, log_speedup)
        aucs = [(end[method, rate], end[twin, rate]) for rate in by_rate]
        known = [(own, other) for own, other in aucs if None not in (own, other)]
        found[method] = {
            "twin": twin,
            "seeds": min(len(paired) for paired in by_rate.values()),
            "rates": rates,
            "speedup": _exp(speedup),
            "auc_difference": _over_rates(by_rate, auc_difference)[0],
            **_verdicts(speedup["interval"]),
            "prevents": any(b <= GONE and a > HALF for a, b in known) if known else None,
        }
    return found


def log_speedup(own: Row, twin: Row) -> float | None:
    """The logarithm of the ratio of half-lives, None where one has none."""
    half, other = half_life_of(own), half_life_of(twin)
    return math.log(other / half) if half and other else None


def auc_difference(own: Row, twin: Row) -> float | None:
    """At the end, None where a run was lost."""
    here, there = own["auc"][-1], twin["auc"][-1]
    return None if here is None or there is None else here - there


def _paired(runs: Runs) -> list[tuple[str, str, float, Pairs]]:
    """Constrained methods, their twins and the rates that both were run at."""
    found = []
    for (method, rate), seeds in runs.items():
        twin = twin_of(method) or ""
        others = runs.get((twin, rate), {})
        if paired := {seed: (row, others[seed]) for seed, row in seeds.items() if seed in others}:
            found.append((method, twin, rate, paired))
    return found


def _over(paired: Pairs, of: Callable[[Row, Row], float | None]) -> dict[int, float | None]:
    return {seed: of(*rows) for seed, rows in paired.items()}


def _over_rates(
    by_rate: Mapping[float, Pairs], of: Callable[[Row, Row], float | None]
) -> tuple[dict[str, Any], list[float]]:
    """An estimate from the means of the seeds over the rates at which no seed lacks a number,
    and these rates."""
    values = {rate: list(_over(paired, of).values()) for rate, paired in by_rate.items()}
    full = {rate: found for rate, found in values.items() if None not in found}
    if not full:
        return estimate([]), []
    per_seed = np.mean([np.asarray(found, np.float64) for found in full.values()], axis=0)
    return estimate(per_seed.tolist()), list(full)


def _verdicts(interval: tuple[float, float] | None) -> dict[str, bool | None]:
    """Of the logarithm's interval."""
    if interval is None:
        return {"speeds_up": None, "slows_down": None}
    return {"speeds_up": interval[0] > 0, "slows_down": interval[1] < 0}


def _exp(logarithm: Mapping[str, Any]) -> dict[str, Any]:
    """An estimate of a ratio from that of its logarithm."""
    value, interval = logarithm["mean"], logarithm["interval"]
    return {
        "mean": None if value is None else math.exp(value),
        "interval": None if interval is None else tuple(map(math.exp, interval)),
    }
