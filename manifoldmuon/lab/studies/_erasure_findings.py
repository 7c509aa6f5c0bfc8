"""What the runs of the study of weight erasure come to: three published claims, and an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from manifoldmuon.lab._figures import short, text_table
from manifoldmuon.lab._study import Row
from manifoldmuon.lab.studies._erasure_claims import accuracy, letter, ranks
from manifoldmuon.lab.studies._erasure_pairs import answer, constraints
from manifoldmuon.lab.studies._erasure_runs import by_seed, ends

# Modula documentation, weight erasure.
PUBLISHED = {
    "data": "cifar10",
    "everything": False,
    "widths": (1024, 1024),
    "steps": 1001,
    "batch": 1024,
}
OF_RANKS = ("data", "everything", "batch")
"""What of it the stable ranks depend on, which have widths of their own."""


def findings(rows: Sequence[Row], protocol: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a record.

    Numbers of several seeds are `{"mean": ..., "interval": [low, high]}`, see `estimate`.

    Args:
      rows: of the record.
      protocol: the keys of `PUBLISHED`, and whatever else is to be told.
    """
    runs = by_seed(rows)
    summed = ends(runs)
    size, ranked = (
        all(protocol[key] == PUBLISHED[key] for key in keys) for keys in (PUBLISHED, OF_RANKS)
    )
    return {
        "protocol": {**protocol, "published": PUBLISHED, "published_size": size},
        "claims": [
            accuracy(runs) | {"published_size": size},
            letter(runs) | {"published_size": size},
            ranks(rows) | {"published_size": ranked},
        ],
        "constraints": constraints(runs, summed),
        "answer": answer(runs, summed),
        "runs": summed,
    }


def table(summary: Mapping[str, Any]) -> str:
    """The findings for a terminal."""
    lines = [
        [
            run["method"],
            format(run["rate"], "g"),
            *(with_reach(run[what], ".3f") for what in ("train_accuracy", "test_accuracy")),
            *(with_reach(run[what], ".3f") for what in ("start_auc", "auc")),
            with_reach(run["half_life"], ".1f"),
            short(run["ratio"]["mean"], ".3f"),
            short(run["update_rank"]["mean"], ".1f"),
        ]
        for run in summary["runs"]
    ]
    header = ["", "rate", "accuracy", "test", "AUC at 0", "AUC", "half-life", "ratio", "rank"]
    told = [_protocol(summary["protocol"]), ""]
    for claim in summary["claims"]:
        told.append(f"- {claim['claim']}: {_HOLDS[claim['holds']]}")
        if not claim["published_size"] and claim["holds"] is not None:
            told[-1] += ", at another size than the published one"
        told += [f"    {name}: {_part(part)}" for name, part in claim["parts"].items()]
    told += [f"- {method}: {_answer(found)}" for method, found in summary["answer"].items()]
    return "\n".join([text_table(header, lines), "", *told])


_HOLDS = {True: "holds", False: "does not hold", None: "not measured"}
_PREVENTS = {
    True: "prevents erasure",
    False: "does not prevent erasure",
    None: "whether it prevents erasure is not measured",
}


def with_reach(estimate: Mapping[str, Any], form: str) -> str:
    """The mean, and half of the interval."""
    value, interval = estimate["mean"], estimate["interval"]
    if value is None or interval is None:
        return short(value, form)
    return f"{value:{form}} ± {(interval[1] - interval[0]) / 2:{form}}"


def _protocol(protocol: Mapping[str, Any]) -> str:
    first, second = protocol["widths"]
    size = "" if protocol["published_size"] else "not "
    return (
        f"{protocol['data']}, hidden layers of {first} and {second}, {protocol['steps']} steps "
        f"with batches of {protocol['batch']}: {size}the published size; seeds: "
        f"{len(protocol['seeds'])}, intervals: 95 %; rank: the stable one of the last update"
    )


def _part(part: Mapping[str, Any]) -> str:
    if part["holds"] is None:
        return _HOLDS[None]
    closest, worst = part["closest"], part["worst_seed"]
    where = " ".join(f"{key} {value:g}" for key, value in closest.items() if key != "mean")
    return (
        f"{_HOLDS[part['holds']]} ({closest['mean']:.3f} at {where}; worst seed "
        f"{worst['value']:.3f})"
    )


def _answer(found: Mapping[str, Any]) -> str:
    speedup, auc = found["speedup"], found["auc_difference"]
    if speedup["mean"] is None:
        told = "speed-up not measured"
    else:
        told = f"erases {_between(speedup, '.2f')} times as fast as without the constraint"
        if found["speeds_up"] is None:
            told += ", undecided with one seed"
        elif not (found["speeds_up"] or found["slows_down"]):
            told += ", which may be chance"
    return f"{told}; AUC {_between(auc, '+.3f')} against its twin's; {_PREVENTS[found['prevents']]}"


def _between(estimate: Mapping[str, Any], form: str) -> str:
    interval = estimate["interval"]
    ends = "" if interval is None else f" ({interval[0]:{form}} to {interval[1]:{form}})"
    return short(estimate["mean"], form) + ends
