"""Findings of weight erasure: three published claims, and the effect of constraints.

Claims are judged on means over seeds. The effect of a constraint on erasure is measured against
the unconstrained twin of each method, paired by seed.
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
"""Settings that affect stable ranks, apart from the widths, which ranks choose separately."""

ENDS = ("train_accuracy", "test_accuracy", "auc", "ratio", "update_rank", "distance")
"""Measurements at the end of a run."""

Runs = Mapping[tuple[str, float], Mapping[int, Row]]
"""Rows by method and learning rate, then by seed."""


def findings(rows: Sequence[Row], protocol: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the rows of a record.

    Values over several seeds are `{"mean": ..., "interval": [low, high]}`, see `estimate`.

    Args:
      rows: the rows of the record.
      protocol: the keys of `PUBLISHED`, and further settings that the table shows.
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
    """Group the rows of runs, in their order."""
    found: dict[tuple[str, float], dict[int, Row]] = {}
    for row in rows:
        if row["part"] == "run":
            found.setdefault((row["method"], row["rate"]), {})[row["seed"]] = row
    return found


def _ends(runs: Runs) -> list[dict[str, Any]]:
    """Estimate the final values of each method and rate over the seeds."""
    return [
        {"method": method, "rate": rate, "seeds": len(seeds)}
        | {what: estimate([row[what][-1] for row in seeds.values()]) for what in ENDS}
        | {"start_auc": estimate([row["auc"][0] for row in seeds.values()])}
        | {"half_life": estimate([_half_life_of(row) for row in seeds.values()])}
        for (method, rate), seeds in runs.items()
    ]


def _half_life_of(row: Row) -> float | None:
    """Return the half-life of the letter in a run."""
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
"""The lowest training accuracy that counts as "1.0", and the highest for the rank-one method."""

TOLERANCE = 0.15
"""The largest relative difference between a stable rank and its published value."""

KINDS = ("gradient", "six_steps", "exact")
"""Updates with a measured stable rank."""

Place = float | int
"""A learning rate or a width."""

Values = Mapping[Place, Mapping[int, float]]
"""Values by rate or width, then by seed."""


class Wanted(NamedTuple):
    """The range of values that confirm a claim, both ends included."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def room(self, value: float) -> float:
        """Return the distance of a value from the nearest end; negative outside the range."""
        return min(value - self.at_least, self.at_most - value)


def _accuracy(runs: Runs) -> dict[str, Any]:
    """Judge the first claim: learning needs a high stable rank."""
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
    """Judge the second claim: erasure needs a high stable rank."""
    both = {name: _values(runs, name, "auc") for name in (DUALIZED, GRADIENT)}
    # Diverged runs count as erased, as in the published pictures of the highest rates.
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
    """Judge the third claim: gradients have stable rank 1, and dualizing raises it."""
    found: dict[str, dict[Place, dict[int, float]]] = {kind: {} for kind in KINDS}
    for row in rows:
        if row["part"] == "ranks":
            for kind in KINDS:
                found[kind].setdefault(row["width"], {})[row["seed"]] = row[kind]
    known = {width: rank for width, rank in PUBLISHED_RANKS.items() if width in found["gradient"]}
    # Relative to the published rank: 1 means equal.
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
    """Judge a part of a claim: it holds if the mean over seeds is in range at every rate or width.

    Returns:
      `holds`, `closest` (the rate or width with the least room, and its mean) and `worst_seed`
      (the seed with the least room, and its value). All are None without measurements.
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
    """Judge a claim: it holds if all parts hold; None if any part was not measured."""
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
    """Replace the values of diverged runs (None) by `lost`."""
    return {
        rate: {seed: lost if value is None else value for seed, value in seeds.items()}
        for rate, seeds in values.items()
    }


def _finite(values: Mapping[Place, Mapping[int, float | None]]) -> Values:
    """Drop the values of diverged runs (None)."""
    kept = {
        rate: {seed: value for seed, value in seeds.items() if value is not None}
        for rate, seeds in values.items()
    }
    return {rate: seeds for rate, seeds in kept.items() if seeds}


# --- The answer --------------------------------------------------------------------------------

Pairs = Mapping[int, tuple[Row, Row]]
"""Rows of a method and of its twin, by seed: with the same start and the same batches."""

SHOWN = ("auc", "half_life", "train_accuracy", "test_accuracy")


def _constraints(runs: Runs, ends: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare every constrained run with its unconstrained twin.

    Returns:
      For each method and rate: `speedup`, the twin's half-life divided by the method's (geometric
      mean over seeds); `auc_difference`, the method's AUC minus the twin's; and the estimates
      `SHOWN` of both, the twin's with prefix `twin_`.
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
    """Decide for each constrained method whether the constraint speeds up or prevents erasure.

    `speedup` is the ratio of half-lives (AUC 0.75), the twin's over the method's: per seed the
    geometric mean over `rates`, the rates at which both reach 0.75 with every seed, then the
    geometric mean over seeds and its interval. The constraint speeds erasure up if the whole
    interval is above 1, slows it down if the whole interval is below 1; with a single seed, which
    has no interval, both are None. `auc_difference` is the mean over the rates without diverged
    runs. The constraint prevents erasure if, at any rate, the final AUC of the twin is at most
    `GONE` and the method's above 0.75, in the mean over seeds.
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
    """Return the logarithm of the ratio of half-lives; None unless both exist and are positive."""
    half, other = _half_life_of(own), _half_life_of(twin)
    return math.log(other / half) if half and other else None


def _auc_difference(own: Row, twin: Row) -> float | None:
    """Return the difference of the final AUCs; None if a run diverged."""
    here, there = own["auc"][-1], twin["auc"][-1]
    return None if here is None or there is None else here - there


def _paired(runs: Runs) -> list[tuple[str, str, float, Pairs]]:
    """List constrained methods with their twins, the rates of both, and their paired rows."""
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
    """Average each seed over the rates at which every seed has a value; return the estimate over
    seeds and these rates."""
    values = {rate: list(_over(paired, of).values()) for rate, paired in by_rate.items()}
    full = {rate: found for rate, found in values.items() if None not in found}
    if not full:
        return estimate([]), []
    per_seed = np.mean([np.asarray(found, np.float64) for found in full.values()], axis=0)
    return estimate(per_seed.tolist()), list(full)


def _verdicts(interval: tuple[float, float] | None) -> dict[str, bool | None]:
    """Return whether the interval of the log speedup is above or below 0."""
    if interval is None:
        return {"speeds_up": None, "slows_down": None}
    return {"speeds_up": interval[0] > 0, "slows_down": interval[1] < 0}


def _exp(logarithm: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the estimate of a logarithm to an estimate of the ratio."""
    value, interval = logarithm["mean"], logarithm["interval"]
    return {
        "mean": None if value is None else math.exp(value),
        "interval": None if interval is None else tuple(map(math.exp, interval)),
    }
