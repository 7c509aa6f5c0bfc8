"""The picture of the learning-rate study, from nothing but its record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._figures import COLOURS, dress, panels


def draw(record: Mapping[str, Any]) -> Any:
    """A row for every sweep: how the best rate moves, then each method's curves; then the rest."""
    transfer, masses = record["summary"]["transfer"], record["summary"]["masses"]
    methods = record["settings"]["methods"]
    colours = dict(zip(methods, COLOURS, strict=False))
    checked = [
        s for s, found in transfer.items() if any(m.get("coordinates") for m in found.values())
    ]
    extra = len(checked) + len(masses)
    columns = 1 + len(methods)
    lower = -(-extra // columns)
    figure, grid = panels(len(transfer) + lower, columns, width=3.2, height=2.9)
    for row, (sweep, found) in zip(grid, transfer.items(), strict=False):
        _movement(row[0], sweep, found, colours)
        heights = [_curves(panel, record["rows"], sweep, method, found[method], colours[method])
                   for panel, method in zip(row[1:], methods, strict=True)]  # fmt: skip
        for panel in row[1:]:
            panel.set_ylim(min(h[0] for h in heights) * 0.85, max(h[1] for h in heights) * 1.1)
    below = [panel for row in grid[len(transfer) :] for panel in row]
    for panel, sweep in zip(below, checked, strict=False):
        _coordinates(panel, record["rows"], sweep, transfer[sweep], colours)
    for panel, (sweep, sizes) in zip(below[len(checked) :], masses.items(), strict=False):
        _masses(panel, sweep, sizes)
    for panel in below[extra:]:
        panel.set_visible(False)
    return figure


def _movement(panel: Any, sweep: str, found: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    panel.axhspan(-0.5, 0.5, color="#eeeeee", zorder=0)
    for shift, (method, entry) in zip(
        np.linspace(-0.09, 0.09, len(found)), found.items(), strict=True
    ):
        known = [(int(size), best) for size, best in entry["best"].items() if not best["edge"]]
        if not known:
            continue
        origin = known[0][1]["log2_rate"]
        x = np.log2([size for size, _ in known]) + shift
        y = [best["log2_rate"] - origin for _, best in known]
        bars = [_half(best["interval"]) for _, best in known]
        panel.errorbar(x, y, yerr=bars, color=colours[method], marker="o", markersize=4,
                       linewidth=1.5, elinewidth=0.8, capsize=2, label=method)  # fmt: skip
    _sizes_as_ticks(panel, [int(s) for s in next(iter(found.values()))["best"]])
    panel.legend(frameon=False, fontsize=7, loc="best")
    dress(panel, f"{sweep}: drift", "of the best rate; grey: half an octave",
          sweep.split("-")[1], "octaves from the smallest")  # fmt: skip


def _curves(
    panel: Any, rows: Sequence[Any], sweep: str, method: str, found: Mapping[str, Any], colour: str
) -> tuple[float, float]:
    """The loss over the rate, a line for each size; returns the heights to be seen."""
    sizes = [int(size) for size in found["best"]]
    low, high = np.inf, 0.0
    for k, size in enumerate(sizes):
        own = [row for row in rows if row["part"] == "rates" and row["sweep"] == sweep
               and row["method"] == method and row["size"] == size]  # fmt: skip
        rates = np.array(own[0]["log2_rates"], float)
        losses = np.array([row["losses"] for row in own], float).mean(axis=0)
        shade = 0.25 + 0.75 * k / max(1, len(sizes) - 1)
        panel.plot(rates, losses, color=_lighter(colour, shade), linewidth=1.5, label=str(size))
        best = found["best"][str(size)]
        if not best["edge"]:
            panel.axvline(best["log2_rate"], color=_lighter(colour, shade), linewidth=0.8,
                          linestyle=(0, (3, 2)))  # fmt: skip
        low, high = min(low, np.nanmin(losses)), max(high, own[0]["first_loss"])
    panel.set_yscale("log")
    panel.legend(frameon=False, fontsize=7, loc="lower left", title=sweep.split("-")[1],
                 title_fontsize=7)  # fmt: skip
    dress(panel, method, f"{sweep}; dashed: the best rate", "log2 of the learning rate", "loss")
    return low, high


def _coordinates(
    panel: Any,
    rows: Sequence[Any],
    sweep: str,
    found: Mapping[str, Any],
    colours: Mapping[str, str],
) -> None:
    """The change of the features before the head, over the width."""
    for method, entry in found.items():
        check = entry.get("coordinates")
        if not check:
            continue
        layer = sorted(check["layers"])[-2 if len(check["layers"]) > 1 else -1]
        own = [row for row in rows if row["part"] == "rates" and row["sweep"] == sweep
               and row["method"] == method]  # fmt: skip
        at = own[0]["log2_rates"].index(check["log2_rate"])
        sizes = [int(size) for size in entry["best"]]
        means = [np.mean([row["changes"][layer][at] for row in own if row["size"] == size])
                 for size in sizes]  # fmt: skip
        panel.plot(np.log2(sizes), means, color=colours[method], marker="o", markersize=4,
                   label=method)  # fmt: skip
        _sizes_as_ticks(panel, sizes)
    panel.set_yscale("log")
    panel.legend(frameon=False, fontsize=7)
    dress(panel, "Coordinate check", f"{sweep}: the last features after a few steps",
          "width", "RMS of their change")  # fmt: skip


def _masses(panel: Any, sweep: str, sizes: Mapping[str, Any]) -> None:
    for (size, found), colour in zip(sizes.items(), COLOURS, strict=False):
        panel.plot(found["masses"], found["losses"], color=colour, marker="o", markersize=4,
                   label=size)  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(next(iter(sizes.values()))["masses"])
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_locator(_no_ticks())
    panel.legend(frameon=False, fontsize=7, title=sweep.split("-")[1], title_fontsize=7)
    dress(panel, "Masses", f"{sweep}: the loss at the best rate", "mass of all blocks", "loss")


def _sizes_as_ticks(panel: Any, sizes: Sequence[int]) -> None:
    panel.set_xticks(np.log2(sizes), [str(size) for size in sizes])


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _half(interval: Sequence[float | int] | None) -> float:
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2


def _lighter(colour: str, strength: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))
