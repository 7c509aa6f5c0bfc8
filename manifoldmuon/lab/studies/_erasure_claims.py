"""The three published claims about weight erasure, judged on means over the seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from manifoldmuon.lab._study import Row
from manifoldmuon.lab.studies._erasure_runs import GONE, NO_LETTER, READABLE, Runs, estimate

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
"""What a training accuracy of "1.0" is here, and the one that the rank-one method may reach."""

TOLERANCE = 0.15
"""The relative difference at which a stable rank counts as the published one."""

KINDS = ("gradient", "six_steps", "exact")
"""Of the updates whose stable rank is measured."""

Place = float | int
"""A learning rate or a width."""

Values = Mapping[Place, Mapping[int, float]]
"""By place, the number of every seed."""


class Wanted(NamedTuple):
    """The numbers that bear a claim out, both ends included."""

    at_least: float = -math.inf
    at_most: float = math.inf

    def room(self, value: float) -> float:
        """How far a value lies inside; negative outside."""
        return min(value - self.at_least, self.at_most - value)


def accuracy(runs: Runs) -> dict[str, Any]:
    """The first claim: the high stable rank is what learns."""
    both = {name: _values(runs, name, "train_accuracy") for name in (DUALIZED, GRADIENT)}
    low = {rate: seeds for rate, seeds in both[DUALIZED].items() if 0 < rate <= 0.5}
    parts = {
        "dualized_learns": part(_filled(low, 0.0), Wanted(at_least=LEARNED)),
        "normalized_does_not": part(_finite(both[GRADIENT]), Wanted(at_most=FAILED)),
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


def letter(runs: Runs) -> dict[str, Any]:
    """The second claim: the high stable rank is what erases."""
    both = {name: _values(runs, name, "auc") for name in (DUALIZED, GRADIENT)}
    # A lost run has no letter either, as the published pictures of the highest rates show.
    dualized = _filled(both[DUALIZED], NO_LETTER)
    fading = {rate: seeds for rate, seeds in dualized.items() if rate == 0.25}
    late = {rate: seeds for rate, seeds in dualized.items() if rate >= 0.5}
    parts = {
        "fades_at_a_quarter": part(fading, Wanted(GONE, READABLE)),
        "gone_from_a_half": part(late, Wanted(at_most=GONE)),
        "never_gone_without": part(_finite(both[GRADIENT]), Wanted(at_least=GONE)),
    }
    return {
        "claim": "the letter fades at 1/4 and is gone from 1/2 with dualization, and never without",
        "published": "by eye",
        "measured": {name: _estimates(found) for name, found in both.items()},
        "thresholds": {"readable": READABLE, "gone": GONE},
    } | _judged(parts)


def ranks(rows: Sequence[Row]) -> dict[str, Any]:
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
        f"{kind}_as_published": part(values, Wanted(1 - TOLERANCE, 1 + TOLERANCE), "width")
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


def part(values: Values, wanted: Wanted, at: str = "rate") -> dict[str, Any]:
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
    """With a number for runs that were lost."""
    return {
        rate: {seed: lost if value is None else value for seed, value in seeds.items()}
        for rate, seeds in values.items()
    }


def _finite(values: Mapping[Place, Mapping[int, float | None]]) -> Values:
    """Without the runs that were lost."""
    kept = {
        rate: {seed: value for seed, value in seeds.items() if value is not None}
        for rate, seeds in values.items()
    }
    return {rate: seeds for rate, seeds in kept.items() if seeds}
