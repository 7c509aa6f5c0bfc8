"""Findings on sets: losses relative to Muon, best rates, singular values, times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab import best_rate, excess_loss
from studies.display import short, text_table
from studies.estimates import at_best_rate, estimate, shown
from studies.spaces.sets import MUON
from studies.study import Row

METRICS = ("held_out_losses", "held_out_errors", "losses")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise the rows of a network."""

    def of(part: str, name: str) -> list[Row]:
        return [row for row in rows if row["part"] == part and row["set"] == name]

    def at_best(part: str, name: str, metric: str) -> tuple[np.ndarray, int]:
        return at_best_rate(np.array([row[metric] for row in of(part, name)], np.float64))

    (seconds,) = [row["seconds"] for row in rows if row["part"] == "cost"]
    sets: dict[str, Any] = {}
    for name in dict.fromkeys(row["set"] for row in rows if row["part"] != "cost"):
        sets[name] = _at_best_rates(of("base", name)) | {
            "step": (seconds["gradient"] + seconds[name]) / (seconds["gradient"] + seconds[MUON]),
            "update": seconds[name] / seconds[MUON],
        }
        for metric in METRICS:
            mine, muons = at_best("base", name, metric)[0], at_best("base", MUON, metric)[0]
            sets[name][metric] = {
                **estimate(mine), "by_seed": mine.tolist(), "over_muon": estimate(mine - muons),
            }  # fmt: skip
            if of("fewer", name):
                sets[name][metric]["fewer_over_muon"] = estimate(
                    at_best("fewer", name, metric)[0] - muons
                )
        if wide := of("wide", name):
            sets[name]["wide"] = _transfer(of("base", name), wide)
    return {"sets": sets, "gradient_over_muon": seconds["gradient"] / seconds[MUON]}


def _at_best_rates(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the best rate, the excess loss at half and twice this rate, and the final singular
    values."""
    curves = np.array([row["held_out_losses"] for row in rows], np.float64)
    exponents = rows[0]["log2_rates"]
    _, at = at_best_rate(curves)
    found: dict[str, Any] = {
        "log2_rate": exponents[at],
        "edge": "below" if at == 0 else "above" if at == len(exponents) - 1 else "",
        "best": best_rate(exponents, curves.tolist())._asdict(),
        "spectra": {
            key: estimate([row["spectra"][key][at] for row in rows])["mean"]
            for key in rows[0]["spectra"]
        },
    }
    for key, neighbour in (("half", at - 1), ("twice", at + 1)):
        inside = 0 <= neighbour < len(exponents)
        found[key] = estimate(curves[:, neighbour] - curves[:, at]) if inside else None
    return found


def _transfer(base: Sequence[Row], wide: Sequence[Row]) -> dict[str, Any]:
    """Estimate the change of the best rate when the width doubles, paired by seed, and the excess
    loss at the best rate of the narrow network."""
    exponents = wide[0]["log2_rates"]
    seeds = [row["seed"] for row in wide]
    narrow = [row["held_out_losses"] for row in base if row["seed"] in seeds]
    curves = [row["held_out_losses"] for row in wide]
    before = best_rate(exponents, narrow).by_seed
    after = best_rate(exponents, curves).by_seed
    known = [(old, new, excess_loss(exponents, curve, old))
             for old, new, curve in zip(before, after, curves, strict=True)
             if old is not None and new is not None]  # fmt: skip
    known = known if len(known) == len(curves) else []
    return {
        "loss": estimate(at_best_rate(np.array(curves, np.float64))[0]),
        "octaves": estimate([new - old for old, new, _ in known]),
        "price": estimate([price for _, _, price in known]),
    }


def table(network: str, summary: Mapping[str, Any]) -> str:
    """Format the findings of a network."""
    lines, others = [], []
    for name, found in summary["sets"].items():
        edge = f" ({found['edge']})" if found["edge"] else ""
        loss = found["held_out_losses"]
        lines.append([
            name, *(shown(found[metric], ".4f") for metric in METRICS[:2]),
            *(shown(found[metric]["over_muon"], "+.4f") for metric in METRICS),
            shown(loss.get("fewer_over_muon"), "+.4f"),
        ])  # fmt: skip
        spectra, wide = found["spectra"], found.get("wide", {})
        others.append([
            name, f"{found['log2_rate']}{edge}", shown(found["best"] | {
                "value": found["best"]["log2_rate"]}, "+.2f"),
            shown(found["half"], "+.3f"), shown(found["twice"], "+.3f"),
            shown(wide.get("octaves"), "+.2f"), shown(wide.get("loss"), ".4f"),
            *(short(spectra[key], ".3g") for key in spectra),
            f"{found['step']:.2f}", f"{found['update']:.2f}",
        ])  # fmt: skip
    return "\n".join([
        f"{network}: each set at its best rate, and beyond Muon, paired by seed",
        text_table(["", "held-out loss", "held-out error", "loss beyond Muon", "error beyond",
                    "training loss beyond", "fewer steps: loss beyond"], lines),
        f"\n{network}: log2 of the best rate, the loss at half and twice that rate, the move of the"
        " best rate at twice the width,\nsingular values at the end, and the time of a step and of"
        " its update against Muon's",
        text_table(["", "grid", "best rate", "half", "twice", "octaves", "loss, wide", "smallest",
                    "median", "largest", "condition", "step", "update"], others),
        "",
    ])  # fmt: skip
