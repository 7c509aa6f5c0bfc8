"""Findings of the transfer study: best rates, drifts, prices, changes and masses."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab import BestRate, best_rate, excess_loss
from studies.display import text_table
from studies.estimates import at_best_rate, mean_estimate, shown, slope_estimate
from studies.study import Row
from studies.transfer.drift import rate_drift

RATES = "rates"
MASS = "mass"
"""The parts of the study: the purpose of a cell."""

BELOW = 3
"""Octaves from the narrowest network's best rate down to the rate of the coordinate check."""


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise the rows of a record."""
    rates = [row for row in rows if row["part"] == RATES]
    transfer: dict[str, Any] = {}
    for sweep, method in dict.fromkeys((row["sweep"], row["method"]) for row in rates):
        own = [row for row in rates if (row["sweep"], row["method"]) == (sweep, method)]
        transfer.setdefault(sweep, {})[method] = _transfer(own)
    masses = [row for row in rows if row["part"] == MASS]
    return {
        "transfer": transfer,
        "masses": {
            sweep: _masses(masses, sweep) for sweep in dict.fromkeys(r["sweep"] for r in masses)
        },
    }


def _transfer(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise a method in a sweep."""
    best = {size: _best(rows, size) for size in dict.fromkeys(row["size"] for row in rows)}
    entry: dict[str, Any] = {"best": {str(size): found._asdict() for size, found in best.items()}}
    entry |= rate_drift(best)._asdict() | {"price": _price(rows, best)}
    if "changes" in rows[0]:
        entry["coordinates"] = _coordinates(rows, best)
    return entry


def _best(rows: Sequence[Row], size: int) -> BestRate:
    own = [row for row in rows if row["size"] == size]
    return best_rate(own[0]["log2_rates"], [row["losses"] for row in own])


def _price(rows: Sequence[Row], best: Mapping[int, BestRate]) -> dict[str, Any] | None:
    """Estimate the increase in log loss of the largest network at the smallest network's best
    rate, relative to its own best rate."""
    smallest = best[min(best)].log2_rate
    own = [row for row in rows if row["size"] == max(best)]
    if smallest is None:
        return None
    prices = [excess_loss(row["log2_rates"], row["losses"], smallest) for row in own]
    known = [price for price in prices if price is not None]
    return mean_estimate(known)._asdict() if len(known) == len(own) else None


def _coordinates(rows: Sequence[Row], best: Mapping[int, BestRate]) -> dict[str, Any] | None:
    """Estimate slopes of feature changes over width, `BELOW` octaves below the narrowest network's
    best rate.

    At this rate feature changes are proportional to the rate; near the best rate they saturate.
    """
    narrow = best[min(best)].log2_rate
    if narrow is None:
        return None
    exponents = rows[0]["log2_rates"]
    at = int(np.argmin(np.abs(np.subtract(exponents, narrow - BELOW))))
    layers = {}
    for layer in rows[0]["changes"]:
        pairs = [(row["size"], row["changes"][layer][at]) for row in rows]
        if any(not change for _, change in pairs):  # zero, or None for NaN
            layers[layer] = {"slope": None, "interval": None}
            continue
        x, y = zip(*pairs, strict=True)
        line = slope_estimate(np.log2(x).tolist(), np.log2(y).tolist())
        layers[layer] = {"slope": line.value, "interval": line.interval}
    return {"log2_rate": exponents[at], "layers": layers}


def _masses(rows: Sequence[Row], sweep: str) -> dict[str, Any]:
    """Summarise by size: the loss at the best rate for every mass, this rate, and the best mass.

    Losses of a seed are at the best rate of the other seeds.
    """
    own = [row for row in rows if row["sweep"] == sweep]
    found: dict[str, Any] = {}
    for size in dict.fromkeys(row["size"] for row in own):
        here = [row for row in own if row["size"] == size]
        masses = list(dict.fromkeys(row["mass"] for row in here))
        curves = [[r["losses"] for r in here if r["mass"] == mass] for mass in masses]
        losses = [mean_estimate(at_best_rate(np.array(each, np.float64))[0]) for each in curves]
        grid = here[0]["log2_rates"]
        found[str(size)] = {
            "masses": masses,
            "losses": [loss._asdict() for loss in losses],
            "log2_rates": [best_rate(grid, each)._asdict() for each in curves],
            "best_mass": masses[int(np.argmin([loss.value for loss in losses]))],
        }
    return found


def table(summary: Mapping[str, Any], masses: Sequence[float]) -> str:
    """Format the findings for a terminal."""
    lines = [
        [f"{sweep}, {method}", *_best_texts(found), _signed(found, "octaves_per_doubling"),
         _signed(found, "span", "span_interval"), found["steady"], _percent(found["price"])]
        for sweep, methods in summary["transfer"].items()
        for method, found in methods.items()
    ]  # fmt: skip
    header = ["log2 of the best rate", "smallest", "largest", "octaves per doubling",
              "smallest to largest", "within half an octave",
              "price of the smallest's rate"]  # fmt: skip
    changes = [
        [f"{sweep}, {method}"] + [_signed(value, "slope")
                                  for value in found["coordinates"]["layers"].values()]
        for sweep, methods in summary["transfer"].items()
        for method, found in methods.items()
        if found.get("coordinates")
    ]  # fmt: skip
    lost = [
        [f"{sweep} {size}", *(shown(loss, ".4f") for loss in found["losses"])]
        for sweep, sizes in summary["masses"].items()
        for size, found in sizes.items()
    ]
    texts = [text_table(header, lines)]
    if changes:
        columns = max(map(len, changes)) - 1
        changes = [line + [""] * (columns + 1 - len(line)) for line in changes]
        texts += ["\nthe coordinate check: change of features, slope in log2 over log2(width)",
                  text_table(["", *[f"layer {i}" for i in range(1, columns + 1)]],
                             changes)]  # fmt: skip
    if lost:
        texts += ["\nthe loss at the best rate, by the mass of the blocks",
                  text_table(["", *(f"{mass:g}" for mass in masses)], lost)]  # fmt: skip
    return "\n".join(texts)


def _best_texts(found: Mapping[str, Any]) -> list[str]:
    ends = list(found["best"].values())
    return [_best_text(ends[0]), _best_text(ends[-1])]


def _best_text(best: Mapping[str, Any]) -> str:
    if best["edge"]:
        return f"{best['edge']} the grid"
    return _signed(best, "log2_rate")


def _percent(price: Mapping[str, Any] | None) -> str:
    """Convert a change of log loss to a relative change in percent, and format it."""
    if price is None:
        return "-"
    ends = price["interval"] and [100 * math.expm1(end) for end in price["interval"]]
    return shown({"value": 100 * math.expm1(price["value"]), "interval": ends}, "+.1f", " %")


def _signed(found: Mapping[str, Any], value: str, interval: str = "interval") -> str:
    return shown({"value": found[value], "interval": found[interval]}, "+.2f")
