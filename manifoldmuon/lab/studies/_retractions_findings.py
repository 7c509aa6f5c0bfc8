"""What the measurements of the retraction laboratory come to."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._figures import short, text_table
from manifoldmuon.lab._intervals import mean, reach
from manifoldmuon.lab._spaces import SPACES
from manifoldmuon.lab._study import Row


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of a record: by manifold and retraction."""
    pairs = dict.fromkeys((row["manifold"], row["retraction"]) for row in rows)
    found: dict[str, Any] = {space: {} for space, _ in pairs}
    for space, name in pairs:
        own, default = ([r for r in rows if (r["manifold"], r["retraction"]) == (space, which)]
                        for which in (name, next(iter(SPACES[space].retractions))))  # fmt: skip
        found[space][name] = _measured(own) | _trained(own, default)
    return found


def _measured(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        if row["part"] == "order":
            found |= {"slope": row["slope"], "error_at_eighth": row["errors"][0]}
        if row["part"] == "cost":
            found |= {"cost": row["cost"], "direction_cost": row["direction_cost"]}
        if row["part"] == "walk":
            found.setdefault("walk", {})[row["dtype"]] = {
                "one_step": [curve[0] for curve in row["distances"]],
                "last_step": [curve[-1] for curve in row["distances"]],
                "effective": row["effective"],
            }
    return found


def _trained(own: Sequence[Row], default: Sequence[Row]) -> dict[str, Any]:
    """By dtype and rate: the loss, and its ratio to that of the manifold's default retraction.

    The ratio is the geometric mean over seeds, paired by seed. `diverged` counts the seeds that
    ended without a number: then there is neither loss nor ratio.
    """
    mine, others = _losses(own), _losses(default)
    if not mine:
        return {}
    found: dict[str, Any] = {}
    for (dtype, rate), values in mine.items():
        lost = sum(value is None for value in values)
        entry: dict[str, Any] = {"diverged": lost, "loss": None, "ratio": None}
        if not lost:
            entry["loss"] = mean(values)._asdict()
            base = others.get((dtype, rate), [None])
            if None not in base:
                entry["ratio"] = _ratio(values, base)
        found.setdefault(dtype, {})[f"{rate:g}"] = entry
    return {"training": found}


def _ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    log = mean(np.log(np.divide(values, base)))
    interval = log.interval and tuple(float(end) for end in np.exp(log.interval))
    return {"value": float(np.exp(log.value)), "interval": interval}


def _losses(rows: Iterable[Row]) -> dict[tuple[str, float], list[Any]]:
    found: dict[tuple[str, float], list[Any]] = {}
    for row in rows:
        if row["part"] == "training":
            found.setdefault((row["dtype"], row["rate"]), []).append(row["loss_on_the_set"])
    return found


def table(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The findings for a terminal."""
    dtypes, rates = settings["dtypes"], settings["rates"]
    at = rates.index(middle(rates))
    lines = []
    for space, entries in summary.items():
        for name, entry in entries.items():
            walks = [entry.get("walk", {}).get(dtype) for dtype in dtypes]
            trained = [entry.get("training", {}).get(dtype) for dtype in dtypes]
            slope = entry.get("slope", 0)
            lines.append([
                f"{space}, {name}",
                "exact" if slope is None else short(slope or None, ".2f"),
                short(entry.get("error_at_eighth")),
                *(short(w and w["one_step"][at]) for w in walks),
                *(short(w and w["last_step"][at]) for w in walks),
                short(walks[0] and walks[0]["effective"][-1], ".3f"),
                short(entry.get("cost"), ".1f"),
                short(entry.get("direction_cost"), ".1f"),
                *(_least(t) for t in trained),
            ])  # fmt: skip
    header = ["", "slope", "error at 1/8", *(f"1 step, {d}" for d in dtypes),
              *(f"{settings['walk_steps']} steps, {d}" for d in dtypes),
              f"step at {rates[-1]:g}", "cost", "direction",
              *(f"least loss, {d}" for d in dtypes)]  # fmt: skip
    legend = (
        f"distances from the set at the rate {rates[at]:g}; costs in products of the same size;\n"
        "losses at the best of the rates, weights put back on the set, and the 95 % interval"
    )
    return f"{text_table(header, lines)}\n{legend}"


def _least(trained: Mapping[str, Any] | None) -> str:
    """The loss at the rate where it is lowest."""
    losses = [entry["loss"] for entry in (trained or {}).values() if entry["loss"]]
    if not losses:
        return "-"
    best = min(losses, key=lambda loss: loss["value"])
    half = reach(best["interval"])
    return f"{best['value']:.1e}" + ("" if half is None else f" ± {half:.0e}")


def middle(rates: Sequence[float]) -> float:
    """The rate at which a single one is shown."""
    return sorted(rates)[len(rates) // 2]
