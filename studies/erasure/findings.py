"""Findings of weight erasure: three published claims, and an answer.

The claims are judged on means over the seeds. The answer, what a constraint does to erasure,
compares every constrained method with its twin, paired by seed.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from studies.erasure.methods import twin_of
from studies.erasure.training import GONE, HALF, NO_LETTER, READABLE, half_life
from studies.estimates import estimate
from studies.study import Row

# Modula documentation, weight erasure.
PUBLISHED = {
    "data": "cifar10",
    "everything": False,
    "widths": (1024, 1024),
    "steps": 1001,
    "batch": 1024,
}
OF_RANKS = ("data", "everything", "batch")
"""The settings that stable ranks depend on, which have widths of their own."""

ENDS = ("train_accuracy", "test_accuracy", "auc", "ratio", "update_rank", "distance")
"""Measurements at the end of a run."""

Runs = Mapping[tuple[str, float], Mapping[int, Row]]
"""The row of every seed, by method and learning rate."""


def findings(rows: Sequence[Row], protocol: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a record.

    Numbers of several seeds are `{"mean": ..., "interval": [low, high]}`, see `estimate`.

    Args:
      rows: of the record.
      protocol: the keys of `PUBLISHED`, and what else the table shows.
    """
    runs = _by_seed(rows)
    summed = _ends(runs)
    size, ranked = (
        all(protocol[key] == PUBLISHED[key] for key in keys) for keys in (PUBLISHED, OF_RANKS)
    )
    return {
        "protocol": {**protocol, "published": PUBLISHED, "published_size": size},
        "claims": [
            _accuracy(runs) | {"published_size": size},
            _letter(runs) | {"published_size": size},
            _ranks(rows) | {"published_size": ranked},
        ],
        "constraints": _constraints(runs, summed),
        "answer": _answer(runs, summed),
        "runs": summed,
    }


def _by_seed(rows: Sequence[Row]) -> Runs:
    """The rows of runs, in their order."""
    found: dict[tuple[str, float], dict[int, Row]] = {}
    for row in rows:
        if row["part"] == "run":
            found.setdefault((row["method"], row["rate"]), {})[row["seed"]] = row
    return found


def _ends(runs: Runs) -> list[dict[str, Any]]:
    """Estimates over the seeds."""
    return [
        {"method": method, "rate": rate, "seeds": len(seeds)}
        | {what: estimate([row[what][-1] for row in seeds.values()]) for what in ENDS}
        | {"start_auc": estimate([row["auc"][0] for row in seeds.values()])}
        | {"half_life": estimate([_half_life_of(row) for row in seeds.values()])}
        for (method, rate), seeds in runs.items()
    ]


def _half_life_of(row: Row) -> float | None:
    """The estimate of the letter of a run."""
    return half_life(row["step"], row["auc"])


# --- The claims --------------------------------------------------------------------------------

DUALIZED, GRADIENT = "dualized:six-steps", "normalized"
"""The two methods of the published experiment."""

# Modula documentation, weight erasure: width 1024, CIFAR-10, 1001 steps, rates 2**-6 to 2**3.
# fmt: off
PUBLISHED_ACCURACY = {
    DUALIZED: dict(zip((2.0**k for k in range(-6, 4)),
                       (1, 1, 1, 1, 1, 1, .999, .987, .104, .104), strict=True)),
    GRADIENT: dict(zip((2.0**k for k in range(-6, 4)),
                       (.418, .458, .485, .525, .601, .696, .758, .451, .104, .104), strict=True)),
}
PUBLISHED_RANKS = {32: 22.6, 128: 57.7, 1024: 145.0}
# fmt: on

LEARNED, FAILED = 0.99, 0.8
"""The training accuracy that counts as "1.0", and the highest one of the rank-one method."""

TOLERANCE = 0.15
"""The relative difference at which a stable rank counts as the published one."""

KINDS = ("gradient", "six_steps", "exact")
"""The updates whose stable rank is measured."""

Place = float | int
"""A learning rate or a width."""

Values = Mapping[Place, Mapping[int, float]]
"""The number of every seed, by place."""


class Wanted(NamedTuple):
    """The numbers that bear a claim out, both ends included."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def room(self, value: float) -> float:
        """The distance of a value from the ends; negative outside."""
        return min(value - self.at_least, self.at_most - value)


def _accuracy(runs: Runs) -> dict[str, Any]:
    """The first claim: the high stable rank is what learns."""
    both = {name: _values(runs, name, "train_accuracy") for name in (DUALIZED, GRADIENT)}
    low = {rate: seeds for rate, seeds in both[DUALIZED].items() if 0 < rate <= 0.5}
    parts = {
        "dualized_learns": _part(_filled(low, 0.0), Wanted(at_least=LEARNED)),
        "normalized_does_not": _part(_finite(both[GRADIENT]), Wanted(at_most=FAILED)),
    }
    return {
        "claim": "dualized training reaches a training accuracy of 1.0 for rates up to 1/2, the "
        "spectrally normalised gradient .42 to .76",
        "published": {
            name: {format(rate, "g"): PUBLISHED_ACCURACY[name].get(rate) for rate in found}
            for name, found in both.items()
        },
        "measured": {name: _estimates(found) for name, found in both.items()},
        "thresholds": {"dualized_at_least": LEARNED, "normalized_at_most": FAILED},
    } | _judged(parts)


def _letter(runs: Runs) -> dict[str, Any]:
    """The second claim: the high stable rank is what erases."""
    both = {name: _values(runs, name, "auc") for name in (DUALIZED, GRADIENT)}
    # A lost run has no letter either, as the published pictures of the highest rates show.
    dualized = _filled(both[DUALIZED], NO_LETTER)
    fading = {rate: seeds for rate, seeds in dualized.items() if rate == 0.25}
    late = {rate: seeds for rate, seeds in dualized.items() if rate >= 0.5}
    parts = {
        "fades_at_a_quarter": _part(fading, Wanted(GONE, READABLE)),
        "gone_from_a_half": _part(late, Wanted(at_most=GONE)),
        "never_gone_without": _part(_finite(both[GRADIENT]), Wanted(at_least=GONE)),
    }
    return {
        "claim": "the letter fades at 1/4 and is gone from 1/2 with dualization, and never without",
        "published": "by eye",
        "measured": {name: _estimates(found) for name, found in both.items()},
        "thresholds": {"readable": READABLE, "gone": GONE},
    } | _judged(parts)


def _ranks(rows: Sequence[Row]) -> dict[str, Any]:
    """The third claim: gradients are of rank one, and dualizing is what changes it."""
    found: dict[str, dict[Place, dict[int, float]]] = {kind: {} for kind in KINDS}
    for row in rows:
        if row["part"] == "ranks":
            for kind in KINDS:
                found[kind].setdefault(row["width"], {})[row["seed"]] = row[kind]
    known = {width: rank for width, rank in PUBLISHED_RANKS.items() if width in found["gradient"]}
    # Of the published rank: 1 is the same.
    relative: dict[str, dict[Place, dict[int, float]]] = {
        kind: {
            width: {seed: rank / of[width] for seed, rank in found[kind][width].items()}
            for width in known
        }
        for kind, of in (("gradient", dict.fromkeys(known, 1.0)), ("six_steps", known))
    }
    parts = {
        f"{kind}_as_published": _part(values, Wanted(1 - TOLERANCE, 1 + TOLERANCE), "width")
        for kind, values in relative.items()
    }
    return {
        "claim": "the stable rank of the middle update is 1.0 at every width for the gradient, and "
        "grows with the width for the dualized one",
        "published": {str(k): {"gradient": 1.0, "six_steps": rank} for k, rank in known.items()},
        "measured": {
            str(width): {kind: estimate(list(found[kind][width].values())) for kind in KINDS}
            for width in found["gradient"]
        },
        "thresholds": {"relative_difference": TOLERANCE},
    } | _judged(parts)


def _part(values: Values, wanted: Wanted, at: str = "rate") -> dict[str, Any]:
    """A part of a claim, which holds if the mean over the seeds does at every rate or width.

    Returns:
      `holds`, `closest` (the rate or width whose mean has the least room, and that mean) and
      `worst_seed` (the seed that has, with its number); None where nothing was measured.
    """
    if not values:
        return {"holds": None, "closest": None, "worst_seed": None}
    means = {where: sum(seeds.values()) / len(seeds) for where, seeds in values.items()}
    closest = min(means, key=lambda where: wanted.room(means[where]))
    every = [(where, *pair) for where, seeds in values.items() for pair in seeds.items()]
    where, seed, value = min(every, key=lambda one: wanted.room(one[2]))
    return {
        "holds": wanted.room(means[closest]) >= 0,
        "closest": {at: closest, "mean": means[closest]},
        "worst_seed": {at: where, "seed": seed, "value": value, "holds": wanted.room(value) >= 0},
    }


def _judged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A claim holds if its parts do; None if one was not measured."""
    verdicts = [one["holds"] for one in parts.values()]
    return {"parts": parts, "holds": None if None in verdicts else all(verdicts)}


def _values(runs: Runs, name: str, what: str) -> dict[Place, dict[int, float | None]]:
    return {
        rate: {seed: row[what][-1] for seed, row in seeds.items()}
        for (method, rate), seeds in runs.items()
        if method == name
    }


def _estimates(values: Mapping[Place, Mapping[int, float | None]]) -> dict[str, Any]:
    return {format(rate, "g"): estimate(list(seeds.values())) for rate, seeds in values.items()}


def _filled(values: Mapping[Place, Mapping[int, float | None]], lost: float) -> Values:
    """The values, with a number for runs that were lost."""
    return {
        rate: {seed: lost if value is None else value for seed, value in seeds.items()}
        for rate, seeds in values.items()
    }


def _finite(values: Mapping[Place, Mapping[int, float | None]]) -> Values:
    """The values without the runs that were lost."""
    kept = {
        rate: {seed: value for seed, value in seeds.items() if value is not None}
        for rate, seeds in values.items()
    }
    return {rate: seeds for rate, seeds in kept.items() if seeds}


# --- The answer --------------------------------------------------------------------------------

Pairs = Mapping[int, tuple[Row, Row]]
"""The rows of a method and of its twin by seed: the same start and the same batches."""

SHOWN = ("auc", "half_life", "train_accuracy", "test_accuracy")


def _constraints(runs: Runs, ends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
            "speedup": _exp(estimate(list(_over(paired, _log_speedup).values()))),
            "auc_difference": estimate(list(_over(paired, _auc_difference).values())),
        }
        | {what: end[method, rate][what] for what in SHOWN}
        | {f"twin_{what}": end[twin, rate][what] for what in SHOWN}
        for method, twin, rate, paired in _paired(runs)
    ]


def _answer(runs: Runs, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
        speedup, rates = _over_rates(by_rate, _log_speedup)
        aucs = [(end[method, rate], end[twin, rate]) for rate in by_rate]
        known = [(own, other) for own, other in aucs if None not in (own, other)]
        found[method] = {
            "twin": twin,
            "seeds": min(len(paired) for paired in by_rate.values()),
            "rates": rates,
            "speedup": _exp(speedup),
            "auc_difference": _over_rates(by_rate, _auc_difference)[0],
            **_verdicts(speedup["interval"]),
            "prevents": any(b <= GONE and a > HALF for a, b in known) if known else None,
        }
    return found


def _log_speedup(own: Row, twin: Row) -> float | None:
    """The logarithm of the ratio of half-lives, None where one has none."""
    half, other = _half_life_of(own), _half_life_of(twin)
    return math.log(other / half) if half and other else None


def _auc_difference(own: Row, twin: Row) -> float | None:
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
    """The middle and the ends of the logarithm's interval."""
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
