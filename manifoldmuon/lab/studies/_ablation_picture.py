"""The picture of the ablation, from nothing but its record."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from manifoldmuon.lab._figures import COLOURS, dress, panels

SHOWN = {"gpt": ("held_out_losses", 1.0, "nats"), "images": ("held_out_errors", 100.0, "% points")}
"""By network: the metric, its factor and its unit."""


def draw(record: Mapping[str, Any]) -> Any:
    """A row for each network: what each choice buys, and every arm."""
    summary = record["summary"]
    figure, grid = panels(len(summary), 2, width=6.6, height=4.6)
    for (gains, arms), (network, metrics) in zip(grid, summary.items(), strict=True):
        metric, factor, unit = SHOWN[network]
        data = record["settings"]["text" if network == "gpt" else "images"]
        what = "held-out loss" if network == "gpt" else "held-out error"
        _gains(gains, metrics[metric]["gains"], factor)
        dress(gains, f"{network}, {data}: what each choice buys",
              "dots: mean and 95 % interval, paired by seed; crosses: in each other setting",
              f"{what}, lowered by ({unit})", "")  # fmt: skip
        _arms(arms, metrics[metric]["arms"], factor)
        dress(arms, f"{network}, {data}: every arm at its best rate",
              "mean and 95 % interval over seeds; *: at an end of the grid of rates",
              f"{what} ({unit.removesuffix(' points')})", "")  # fmt: skip
    return figure


def _gains(panel: Any, gains: Mapping[str, Any], factor: float) -> None:
    panel.axvline(0, color="#444444", linewidth=1)
    for y, found in enumerate(gains.values()):
        single = [factor * one["mean"] for one in found.get("by_arm", {}).values()]
        panel.plot(single, np.full(len(single), y + 0.22), "x", color="#767676", markersize=4)
        _bar(panel, found, y, factor, COLOURS[0])
    panel.set_yticks(range(len(gains)), [what.replace(", ", ",\n") for what in gains])
    panel.invert_yaxis()


def _arms(panel: Any, arms: Mapping[str, Any], factor: float) -> None:
    ordered = sorted(arms.items(), key=lambda item: item[1]["mean"])
    for y, (name, found) in enumerate(ordered):
        _bar(panel, found, y, factor, COLOURS[0] if name.startswith("manifold") else
             COLOURS[1] if name.startswith("flat") else COLOURS[-1])  # fmt: skip
    labels = [" ".join([name, "*" if found["edge"] else ""]) for name, found in ordered]
    panel.set_yticks(range(len(ordered)), labels, fontsize=8)
    panel.invert_yaxis()


def _bar(panel: Any, found: Mapping[str, Any], y: int, factor: float, colour: str) -> None:
    low, high = found["interval"]
    middle = factor * found["mean"]
    panel.errorbar([middle], [y], xerr=factor * (high - low) / 2, fmt="o", color=colour,
                   markersize=5, elinewidth=1.3, capsize=3)  # fmt: skip
