"""Findings of the transformers: losses relative to Muon, ranges of rates, rounding, widths."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab import best_rate
from studies.display import short, text_table
from studies.estimates import estimate, shown
from studies.study import Row
from studies.transformers.methods import MUON
from studies.transformers.rounding import ROUNDINGS

CLOSE = 0.02
"""A rate is good if its loss is at most this many nats above the best."""


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise the rows by size and length, and by width."""
    found: dict[str, Any] = {"losses": {}, "widths": {}}
    main = [row for row in rows if row["part"] == "main"]
    for size, steps in dict.fromkeys((row["size"], row["steps"]) for row in main):
        own = {row["method"]: row for row in main if (row["size"], row["steps"]) == (size, steps)}
        found["losses"][f"{size}, {steps} steps"] = {
            name: _method(row, own[MUON]) for name, row in own.items()
        }
    wide = [row for row in rows if row["part"] == "width"]
    for name in dict.fromkeys(row["method"] for row in wide):
        found["widths"][name] = _widths([row for row in wide if row["method"] == name])
    return found


def _method(row: Row, muon: Row) -> dict[str, Any]:
    loss, muons = _array(row["loss"]), _array(muon["loss"])
    rounded = {}
    for name in ROUNDINGS:
        cost, muons_cost = _array(row[name]) - loss, _array(muon[name]) - muons
        rounded[name] = {**estimate(cost), "part_of_muons": _ratio(cost, muons_cost)}
    return {
        "loss": estimate(loss),
        "over_muon": estimate(loss - muons),
        "train_loss_over_muon": estimate(_array(row["train_loss"]) - _array(muon["train_loss"])),
        "log2_rate": row["log2_rate"],
        "second": row["second"],
        "value": row["value"],
        "momentum": row["momentum"],
        "rest_rate": row["rest_rate"],
        "octaves": range_of_rates(row["tuned"], row["place"][1:]),
        "rounded": rounded,
        **{name: estimate(row[name]) for name in ("kurtosis", "dead", "rare")},
    }


def range_of_rates(tuned: Sequence[Sequence[Any]], others: Sequence[int]) -> dict[str, Any]:
    """Return how many octaves of rates are within `CLOSE` of the best, other knobs at their best.

    The loss is interpolated linearly between tried rates.

    Args:
      tuned: lists of half octaves of the rate, the other knobs, and the loss.
      others: the best values of the other knobs.

    Returns:
      `octaves`, and `open`: True if the range extends beyond the tried rates.
    """
    curve = sorted(
        (rate / 2, loss) for rate, *at, loss in tuned if at == list(others) and loss is not None
    )
    x, y = np.array(curve, np.float64).T
    best = int(y.argmin())
    limit, ends, is_open = y[best] + CLOSE, [], False
    for way in (-1, 1):
        at = best
        while 0 <= at + way < len(y) and y[at + way] <= limit:
            at += way
        if not 0 <= at + way < len(y):
            is_open = True
            ends.append(x[at])
        else:
            part = (limit - y[at]) / (y[at + way] - y[at])
            ends.append(x[at] + part * (x[at + way] - x[at]))
    return {"octaves": ends[1] - ends[0], "open": is_open}


def _widths(rows: Sequence[Row]) -> dict[str, Any]:
    found = {}
    for row in rows:
        best = best_rate(row["log2_rates"], row["loss"])
        lowest = np.min(_array(row["loss"]).mean(axis=0))
        means = _array(row["loss"]).mean(axis=0).tolist()
        curve = [[2 * rate, loss] for rate, loss in zip(row["log2_rates"], means, strict=True)]
        found[str(row["width"])] = {
            **best._asdict(),
            "loss": float(lowest),
            "octaves": range_of_rates(curve, []),
        }
    return found


def _ratio(values: np.ndarray, others: np.ndarray) -> float | None:
    return float(values.mean() / others.mean()) if others.mean() > 0 else None


def _array(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, np.float64)


def table(found: Mapping[str, Any]) -> str:
    """Return the findings as text."""
    parts = []
    for title, methods in found["losses"].items():
        lines = []
        for name, own in methods.items():
            mark = ">" if own["octaves"]["open"] else ""
            lines.append([
                name, shown(own["loss"], ".4f"), shown(own["over_muon"], "+.4f"),
                shown(own["train_loss_over_muon"], "+.3f"), f"{own['log2_rate']:g}",
                f"{own['second']} {own['value']:.3g}", f"{own['momentum']:.2g}",
                f"{own['rest_rate']:.3g}", f"{mark}{own['octaves']['octaves']:.1f}",
                *(shown({**own["rounded"][kind], "interval": None}, ".4f") for kind in ROUNDINGS),
                short(own["rounded"]["bits4"]["part_of_muons"], ".2f"),
                short(own["kurtosis"]["mean"], ".1f"),
                *(short(own[kind]["mean"], ".1%") for kind in ("dead", "rare")),
            ])  # fmt: skip
        parts.append(title + "\n" + text_table(
            ["", "held-out loss", "beyond Muon", "training", "log2 rate", "other knob",
             "momentum", "rest", "octaves",
             *(f"+{kind}" for kind in ROUNDINGS), "4 bits, of Muon's", "kurtosis", "dead", "rare"],
            lines,
        ))  # fmt: skip
    if found["widths"]:
        widths = list(dict.fromkeys(width for own in found["widths"].values() for width in own))
        lines = [
            [name, *(
                f"{shown(at | {'value': at['log2_rate']}, '+.2f')} ({at['loss']:.3f}; "
                f"{'>' if at['octaves']['open'] else ''}{at['octaves']['octaves']:.1f})"
                if (at := own.get(width)) else "-" for width in widths
            )]
            for name, own in found["widths"].items()
        ]  # fmt: skip
        parts.append("log2 of the best rate by width (the loss there; octaves within 0.02 of it)\n"
                     + text_table(["", *widths], lines))  # fmt: skip
    return "\n\n".join(parts)
