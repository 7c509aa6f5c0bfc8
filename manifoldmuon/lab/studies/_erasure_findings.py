"""What the runs of the study of weight erasure come to: three published claims, and an answer."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._figures import short, text_table
from manifoldmuon.lab._study import Row
from manifoldmuon.lab.studies._erasure_methods import twin_of

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

# Published by eye; a sharp letter has an AUC of 1, none 0.5.
READABLE, HALF, GONE = 0.9, 0.75, 0.6

LEARNED, FAILED = 0.99, 0.8
"""What a training accuracy of "1.0" is here, and the one that the rank-one method may reach."""

TOLERANCE = 0.15
"""The relative difference at which a stable rank counts as the published one."""


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of a record."""
    runs = _runs([row for row in rows if row["part"] == "run"])
    rates = {(run["method"], run["rate"]): run for run in runs}
    measured = [row for row in rows if row["part"] == "ranks"]
    constraints = _constraints(rates)
    return {
        "claims": [_accuracy(rates), _letter(rates), _ranks(measured)],
        "constraints": constraints,
        "answer": _answer(constraints),
        "runs": runs,
    }


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


def _runs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ends of the runs: means over the seeds."""
    found = []
    for (method, rate), group in itertools.groupby(rows, lambda r: (r["method"], r["rate"])):
        seeds = list(group)
        ends = ("train_accuracy", "test_accuracy", "auc", "ratio", "update_rank", "distance")
        found.append(
            {"method": method, "rate": rate, "seeds": len(seeds)}
            | {what: _mean([row[what][-1] for row in seeds]) for what in ends}
            | {"start_auc": _mean([row["auc"][0] for row in seeds])}
            | {"auc_range": _range([row["auc"][-1] for row in seeds])}
            | {"half_life": _mean([half_life(row["step"], row["auc"]) for row in seeds])}
        )
    return found


def _accuracy(runs: Mapping[tuple[str, float], Any]) -> dict[str, Any]:
    """The first claim: the high stable rank is what learns."""
    both = {name: _of(runs, name, "train_accuracy") for name in (DUALIZED, GRADIENT)}
    low = [value or 0.0 for rate, value in both[DUALIZED].items() if 0 < float(rate) <= 0.5]
    other = list(both[GRADIENT].values())
    parts = {
        "dualized_learns": min(low) >= LEARNED if low else None,
        "normalized_does_not": _largest(other) <= FAILED if other else None,
    }
    return {
        "claim": "dualized training reaches a training accuracy of 1.0 for rates up to 1/2, the "
        "spectrally normalised gradient .42 to .76",
        "published": {
            name: {key: PUBLISHED_ACCURACY[name].get(float(key)) for key in both[name]}
            for name in both
        },
        "measured": both,
        "thresholds": {"dualized_at_least": LEARNED, "normalized_at_most": FAILED},
        "parts": parts,
        "holds": _all(parts),
    }


def _letter(runs: Mapping[tuple[str, float], Any]) -> dict[str, Any]:
    """The second claim: the high stable rank is what erases."""
    both = {name: _of(runs, name, "auc") for name in (DUALIZED, GRADIENT)}
    dualized = {float(rate): value for rate, value in both[DUALIZED].items()}
    fading = dualized.get(0.25)
    # A lost run has no letter either, as the published pictures of the highest rates show.
    gone = [GONE if auc is None else auc for rate, auc in dualized.items() if rate >= 0.5]
    kept = [auc for auc in both[GRADIENT].values() if auc is not None]
    parts = {
        "fades_at_a_quarter": None if fading is None else GONE < fading < READABLE,
        "gone_from_a_half": max(gone) <= GONE if gone else None,
        "never_gone_without": min(kept) > GONE if kept else None,
    }
    return {
        "claim": "the letter fades at 1/4 and is gone from 1/2 with dualization, and never without",
        "published": "by eye",
        "measured": both,
        "thresholds": {"readable": READABLE, "gone": GONE},
        "parts": parts,
        "holds": _all(parts),
    }


def _ranks(rows: Sequence[Row]) -> dict[str, Any]:
    """The third claim: gradients are of rank one, and dualizing is what changes it."""
    measured = {}
    for width, group in itertools.groupby(rows, lambda row: row["width"]):
        seeds = list(group)
        kinds = ("gradient", "six_steps", "exact")
        measured[str(width)] = {kind: _mean([row[kind] for row in seeds]) for kind in kinds}
    known = {width: rank for width, rank in PUBLISHED_RANKS.items() if str(width) in measured}
    return {
        "claim": "the stable rank of the middle update is 1.0 at every width for the gradient, and "
        "grows with the width for the dualized one",
        "published": {str(k): {"gradient": 1.0, "six_steps": rank} for k, rank in known.items()},
        "measured": measured,
        "thresholds": {"relative_difference": TOLERANCE},
        "holds": all(
            abs(measured[str(width)]["gradient"] - 1) <= TOLERANCE
            and abs(measured[str(width)]["six_steps"] / rank - 1) <= TOLERANCE
            for width, rank in known.items()
        )
        if known
        else None,
    }


def _constraints(runs: Mapping[tuple[str, float], Any]) -> list[dict[str, Any]]:
    """Every constrained run beside its twin in flat space."""
    found = []
    for (method, rate), run in runs.items():
        twin = runs.get((twin_of(method) or "", rate))
        if twin is None:
            continue
        own, other = run["half_life"], twin["half_life"]
        found.append(
            {"method": method, "twin": twin["method"], "rate": rate}
            | {what: run[what] for what in ("auc", "half_life", "train_accuracy")}
            | {f"twin_{what}": twin[what] for what in ("auc", "half_life", "train_accuracy")}
            | {"speedup": other / own if own and other else None}
        )
    return found


def _answer(constraints: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Does the constraint speed erasure up or prevent it? For each constrained method.

    `speedup` is how many times sooner the AUC is at 0.75 than that of the twin: the geometric
    mean over the rates at which both come there. It counts if it is 10 %, either way. Erasure is
    prevented where the twin's letter is gone at the end and the method's has an AUC above 0.75.
    """
    answer = {}
    for method, group in itertools.groupby(constraints, lambda pair: pair["method"]):
        pairs = list(group)
        ratios = [pair["speedup"] for pair in pairs if pair["speedup"]]
        ends = [(p["auc"], p["twin_auc"]) for p in pairs if None not in (p["auc"], p["twin_auc"])]
        speedup = float(np.exp(np.mean(np.log(ratios)))) if ratios else None
        answer[method] = {
            "speedup": speedup,
            "rates": len(ratios),
            "auc_difference": _mean([own - other for own, other in ends]),
            "speeds_up": None if speedup is None else speedup >= 1.1,
            "slows_down": None if speedup is None else speedup <= 1 / 1.1,
            "prevents": any(other <= GONE and own > HALF for own, other in ends),
        }
    return answer


def table(summary: Mapping[str, Any]) -> str:
    """The findings for a terminal."""
    lines = [
        [
            run["method"],
            format(run["rate"], "g"),
            *(short(run[what], ".3f") for what in ("train_accuracy", "start_auc", "auc", "ratio")),
            short(run["half_life"], ".1f"),
            short(run["update_rank"], ".1f"),
        ]
        for run in summary["runs"]
    ]
    header = ["", "rate", "accuracy", "AUC at 0", "AUC", "ratio", "half-life", "update's rank"]
    told = [f"- {claim['claim']}: {_VERDICT[claim['holds']]}" for claim in summary["claims"]]
    for method, found in summary["answer"].items():
        verdict = "prevents erasure" if found["prevents"] else "does not prevent erasure"
        told.append(
            f"- {method}: erases {short(found['speedup'], '.2f')} times as fast as without the "
            f"constraint, {verdict}"
        )
    return "\n".join([text_table(header, lines), "", *told])


_VERDICT = {True: "holds", False: "does not hold", None: "not measured"}


def _of(runs: Mapping[tuple[str, float], Any], name: str, what: str) -> dict[str, float | None]:
    return {format(rate, "g"): run[what] for (method, rate), run in runs.items() if method == name}


def _all(parts: Mapping[str, bool | None]) -> bool | None:
    """None if a part was not measured."""
    return None if None in parts.values() else all(parts.values())


def _largest(values: Sequence[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of them is missing."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
