"""Marks that the panels of weight erasure share: bars, bands, levels and published numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab.studies._erasure_runs import GONE, HALF, READABLE


def levels(panel: Any) -> None:
    """What counts as readable, half gone and gone; the AUC is the ordinate."""
    for level, text in ((READABLE, "readable"), (HALF, "half"), (GONE, "gone")):
        panel.axhline(level, color="#444444", linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        panel.annotate(text, (1, level), xycoords=("axes fraction", "data"), ha="left",
                       xytext=(3, 0), textcoords="offset points", va="center", fontsize=8,
                       color="#444444")  # fmt: skip
    panel.set_ylim(0.45, 1.02)


def with_bars(
    panel: Any,
    x: Sequence[float | int],
    found: Sequence[Mapping[str, Any]],
    colour: str,
    label: str,
) -> None:
    """Means with their intervals as bars; one seed has none."""
    means, low, high = _limits(found)
    panel.errorbar(x, means, [means - low, high - means], color=colour, marker="o", markersize=4,
                   linewidth=1.4, elinewidth=1.1, capsize=2.5, label=label)  # fmt: skip


def with_band(
    panel: Any,
    x: Sequence[float | int],
    found: Sequence[Mapping[str, Any]],
    colour: str,
    label: str,
    style: Any,
) -> None:
    """Means as a line, with their intervals around it."""
    means, low, high = _limits(found)
    panel.plot(x, means, color=colour, linewidth=1.4, linestyle=style, label=label)
    panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def published_at(
    panel: Any, x: Sequence[float | int], y: Sequence[float | int], colour: str
) -> None:
    """Open circles."""
    panel.plot(x, y, linestyle="none", marker="o", markersize=8, markerfacecolor="none",
               color=colour, zorder=3)  # fmt: skip


def _limits(found: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means and both ends of their intervals, NaN where there is none."""
    means = [np.nan if one["mean"] is None else one["mean"] for one in found]
    both = [one["interval"] or (mean, mean) for one, mean in zip(found, means, strict=True)]
    low, high = np.array(both, np.float64).reshape(-1, 2).T
    return np.array(means, np.float64), low, high
