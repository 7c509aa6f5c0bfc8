"""The picture of the learning-rate study, from the record alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.display import COLOURS, dress, legend_above, panels
from studies.estimates import half_width
from studies.transfer.findings import RATES


def picture(record: Mapping[str, Any]) -> Any:
    """Plot for every sweep the best rates, the curves of the first and the last method, and, if
    measured, the coordinate check or masses."""
    transfer, masses = record["summary"]["transfer"], record["summary"]["masses"]
    methods, rows = record["settings"]["methods"], record["rows"]
    colours = dict(zip(methods, COLOURS, strict=False))
    figure, grid = panels(2 * len(transfer), 2, width=4.4, height=3.2)
    for k, (sweep, found) in enumerate(transfer.items()):
        movement, *curves, last = grid[2 * k : 2 * k + 2].flat
        _movement(movement, sweep, found, colours)
        heights = [
            _curves(panel, rows, sweep, method, found[method], colours[method])
            for panel, method in zip(curves, (methods[0], methods[-1]), strict=True)
        ]
        for panel in curves:
            panel.set_ylim(min(h[0] for h in heights) * 0.85, max(h[1] for h in heights) * 1.1)
        if _checked(found):
            _coordinates(last, rows, sweep, found, colours)
        elif sweep in masses:
            _masses(last, sweep, masses[sweep])
        else:
            last.set_visible(False)
    legend_above(figure, grid[0, 0], columns=5)
    return figure


def _checked(found: Mapping[str, Any]) -> bool:
    """Return True if there is a coordinate check."""
    return any(entry.get("coordinates") for entry in found.values())


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
        bars = [half_width(best["interval"]) or 0.0 for _, best in known]
        panel.errorbar(x, y, yerr=bars, color=colours[method], marker="o", markersize=4,
                       linewidth=1.5, elinewidth=0.8, capsize=2, label=method)  # fmt: skip
    _sizes_as_ticks(panel, [int(s) for s in next(iter(found.values()))["best"]])
    dress(panel, f"{sweep}: drift", "of the best rate; grey: half an octave",
          sweep.split("-")[1], "octaves from the smallest")  # fmt: skip


def _curves(
    panel: Any, rows: Sequence[Any], sweep: str, method: str, found: Mapping[str, Any], colour: str
) -> tuple[float, float]:
    """Plot the loss against the rate, with a line for each size; return the visible range."""
    sizes = [int(size) for size in found["best"]]
    low, high = np.inf, 0.0
    for k, size in enumerate(sizes):
        own = [row for row in rows if row["part"] == RATES and row["sweep"] == sweep
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
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5),
                 title=sweep.split("-")[1])  # fmt: skip
    dress(panel, method, f"{sweep}; dashed: the best rate", "log2 of the learning rate", "loss")
    return low, high


def _coordinates(
    panel: Any,
    rows: Sequence[Any],
    sweep: str,
    found: Mapping[str, Any],
    colours: Mapping[str, str],
) -> None:
    """Plot the change of the scores against width, relative to the narrowest network."""
    for method, entry in found.items():
        check = entry.get("coordinates")
        if not check:
            continue
        layer = max(check["layers"])
        own = [row for row in rows if row["part"] == RATES and row["sweep"] == sweep
               and row["method"] == method]  # fmt: skip
        at = own[0]["log2_rates"].index(check["log2_rate"])
        sizes = [int(size) for size in entry["best"]]
        means = [np.mean([row["changes"][layer][at] for row in own if row["size"] == size])
                 for size in sizes]  # fmt: skip
        ratios = np.divide(means, means[0])
        panel.plot(np.log2(sizes), ratios, color=colours[method], marker="o", markersize=4,
                   label=method)  # fmt: skip
        _sizes_as_ticks(panel, sizes)
    panel.set_ylim(bottom=0)
    dress(panel, "Coordinate check", "of the scores after a few steps of a small rate",
          "width", "change, over the narrowest's")  # fmt: skip


def _masses(panel: Any, sweep: str, sizes: Mapping[str, Any]) -> None:
    for (size, found), colour in zip(sizes.items(), COLOURS, strict=False):
        values = [loss["value"] for loss in found["losses"]]
        bars = [half_width(loss["interval"]) or 0.0 for loss in found["losses"]]
        panel.errorbar(found["masses"], values, bars, color=colour, marker="o", markersize=4,
                       label=size, elinewidth=0.8, capsize=2)  # fmt: skip
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_xticks(next(iter(sizes.values()))["masses"])
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_locator(_no_ticks())
    panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5),
                 title=sweep.split("-")[1])  # fmt: skip
    dress(panel, "Masses", f"{sweep}: the loss at the best rate", "mass of all blocks", "loss")


def _sizes_as_ticks(panel: Any, sizes: Sequence[int]) -> None:
    panel.set_xticks(np.log2(sizes), [str(size) for size in sizes])


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _lighter(colour: str, strength: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))
