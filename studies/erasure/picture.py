"""The picture of weight erasure, from the record alone.

Unconstrained methods against published numbers, constrained methods against their twins, and
drawing helpers: bars, bands, levels and published numbers.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from studies.display import COLOURS, dress, panels
from studies.erasure.findings import DUALIZED, GRADIENT, PUBLISHED_ACCURACY
from studies.erasure.methods import FLAT, RETRACTIONS, split
from studies.erasure.training import GONE, HALF, READABLE
from studies.estimates import estimate

FREE = {
    DUALIZED: COLOURS[0],
    "dualized:exact": COLOURS[5],
    GRADIENT: COLOURS[3],
    "adam": COLOURS[7],
    "gradient": COLOURS[6],
}
"""Unconstrained methods and their colours."""

SPACES = {
    "stiefel": COLOURS[2],
    "orthogonal": COLOURS[0],
    "hypersphere": COLOURS[1],
    "rows": COLOURS[4],
}

TWIN = (0, (4, 2))
"""The dashes of unconstrained twins."""


def picture(record: Mapping[str, Any]) -> Any:
    """Plot accuracy, erasure and stable ranks against published values, and constraints against
    their twins.

    Panels without measurements are left out.
    """
    summary = record["summary"]
    kinds = {split(run["method"])[0] for run in summary["runs"]}
    drawn: list[Callable[[Any], None]] = []
    if kinds - set(RETRACTIONS):
        drawn += [lambda panel: _accuracy(panel, summary), lambda panel: _erasure(panel, summary)]
    if summary["claims"][2]["measured"]:
        drawn.append(lambda panel: _ranks(panel, summary))
    if kinds & set(RETRACTIONS):
        drawn.append(lambda panel: _curves(panel, record))
    if summary["constraints"]:
        rate = _shown_rate([pair["rate"] for pair in summary["constraints"]])
        drawn.append(lambda panel: _speedups(panel, summary, rate))
        drawn.append(lambda panel: _differences(panel, summary, rate))
    # The last two panels share labels and must be in the same row: 2 x 2, 2 x 3.
    columns = 2 if len(drawn) == 4 else min(3, max(len(drawn), 1))
    rows = -(-len(drawn) // columns) or 1
    figure, places = panels(rows, columns, width=5.4, height=4.5)
    for panel, draw in itertools.zip_longest(places.flat, drawn):
        if draw is None:
            panel.set_visible(False)
        else:
            draw(panel)
    handles, labels = places.flat[0].get_legend_handles_labels()
    if kinds - set(RETRACTIONS):
        figure.legend(handles, labels, loc="outside upper left", ncols=len(FREE), frameon=False,
                      fontsize=9)  # fmt: skip
    return figure


def _accuracy(panel: Any, summary: Mapping[str, Any]) -> None:
    _by_rate(panel, summary["runs"], "train_accuracy")
    for name, published in PUBLISHED_ACCURACY.items():
        rates = {run["rate"] for run in summary["runs"] if run["method"] == name}
        here = [rate for rate in published if rate in rates]
        _published_at(panel, here, [published[rate] for rate in here], FREE[name])
    panel.set_ylim(0, 1.05)
    size = "" if summary["protocol"]["published_size"] else ", at width 1024 after 1001 steps"
    dress(panel, "Learning", f"open circles: published{size}", "learning rate",
          "training accuracy")  # fmt: skip


def _erasure(panel: Any, summary: Mapping[str, Any]) -> None:
    _by_rate(panel, summary["runs"], "auc")
    _levels(panel)
    dress(panel, "Erasure", "at the end of training; 1 is a sharp letter, 0.5 none",
          "learning rate", "AUC of |W| as a sign of the mask")  # fmt: skip


def _by_rate(panel: Any, runs: Sequence[Mapping[str, Any]], what: str) -> None:
    every = []
    for name, colour in FREE.items():
        found = [run for run in runs if split(run["method"]) == split(name) and run["rate"] > 0]
        if found:
            rates = [run["rate"] for run in found]
            _with_bars(panel, rates, [run[what] for run in found], colour, name)
            every += rates
    panel.set_xscale("log", base=10 if every and max(every) > 100 * min(every) else 2)


def _ranks(panel: Any, summary: Mapping[str, Any]) -> None:
    claim = summary["claims"][2]
    widths = [int(width) for width in claim["measured"]]
    kinds = {
        "exact": ("dualized, exactly", FREE["dualized:exact"]),
        "six_steps": ("dualized, six steps", FREE[DUALIZED]),
        "gradient": ("gradient", FREE[GRADIENT]),
    }
    for kind, (label, colour) in kinds.items():
        _with_bars(panel, widths, [at[kind] for at in claim["measured"].values()], colour, label)
        known = {int(w): ranks[kind] for w, ranks in claim["published"].items() if kind in ranks}
        _published_at(panel, list(known), list(known.values()), colour)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(widths, [str(width) for width in widths])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=8, loc="upper left")
    dress(panel, "Stable rank of the first update", "open circles: published", "width",
          "stable rank")  # fmt: skip


# --- Constraints -------------------------------------------------------------------------------


def _curves(panel: Any, record: Mapping[str, Any]) -> None:
    """Plot the AUC over steps: the first retraction of each manifold (solid), its twin (dashed)."""
    runs = [row for row in record["rows"] if row["part"] == "run"]
    rate = _shown_rate([row["rate"] for row in runs if split(row["method"])[0] in SPACES])
    seen = set()
    for method, group in itertools.groupby(
        (row for row in runs if row["rate"] == rate), lambda row: row["method"]
    ):
        kind, variant = split(method)
        what = (kind, variant == FLAT)
        if kind not in SPACES or what in seen:
            continue
        seen.add(what)
        seeds = list(group)
        found = [estimate(values) for values in zip(*(s["auc"] for s in seeds), strict=True)]
        style = TWIN if variant == FLAT else "-"
        _with_band(panel, seeds[0]["step"], found, SPACES[kind], method, style)
    _levels(panel)
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xlim(left=0)
    panel.legend(frameon=False, fontsize=8, loc="lower left")
    dress(panel, "Constraints", f"at rate {rate:g}; dashed: the same norm and start, unconstrained",
          "steps", "AUC of |W| as a sign of the mask")  # fmt: skip


def _speedups(panel: Any, summary: Mapping[str, Any], rate: float) -> None:
    _forest(panel, summary, "speedup", rate)
    panel.axvline(1, color="#444444", linewidth=0.9)
    _ratio_axis(panel)
    dress(panel, "Speed-up by the constraint", _what(rate),
          "half-life of the twin / half-life; none: not half gone, or lost", "")  # fmt: skip


def _differences(panel: Any, summary: Mapping[str, Any], rate: float) -> None:
    _forest(panel, summary, "auc_difference", rate)
    panel.tick_params(labelleft=False)
    panel.locator_params(axis="x", nbins=6)
    panel.axvline(0, color="#444444", linewidth=0.9)
    dress(panel, "What the constraint leaves of the letter", _what(rate),
          "AUC at the end, less that of the twin", "")  # fmt: skip


def _shown_rate(rates: Sequence[float]) -> float:
    """Return the rate at which constraints are shown: 1/4 if measured, else the lowest."""
    return 0.25 if 0.25 in rates else min(rates)


def _forest(panel: Any, summary: Mapping[str, Any], what: str, rate: float) -> None:
    """Plot an interval for each method with a twin, at `rate` (full) and, if there are several
    rates, over all rates (open)."""
    methods = list(summary["answer"])[::-1]
    at = {pair["method"]: pair[what] for pair in summary["constraints"] if pair["rate"] == rate}
    several = {
        method: summary["answer"][method][what]
        for method in methods
        if len({pair["rate"] for pair in summary["constraints"] if pair["method"] == method}) > 1
    }
    for found, lift, full in ((at, 0.18, True), (several, -0.18, False)):
        for method, number in found.items():
            colour = SPACES[split(method)[0]]
            place = methods.index(method) + (lift if method in several else 0)
            if number["mean"] is None:
                if full:
                    panel.annotate("none", (0.01, place), xycoords=("axes fraction", "data"),
                                   va="center", fontsize=7, color="#777777")  # fmt: skip
                continue
            panel.plot(number["interval"] or [number["mean"]] * 2, [place] * 2, color=colour,
                       linewidth=1.4)  # fmt: skip
            panel.plot(number["mean"], place, marker="o", markersize=5, color=colour,
                       markerfacecolor=colour if full else "white")  # fmt: skip
    panel.set_yticks(range(len(methods)), methods, fontsize=8)
    panel.set_ylim(-0.6, len(methods) - 0.4)


def _ratio_axis(panel: Any) -> None:
    """Make the x axis logarithmic, with round ticks, cut off at a factor of 10 either way."""
    low, high = panel.get_xlim()
    low, high = max(low, 0.1), min(max(high, 1.1), 10)
    wide = high / low > 4
    ticks = (0.1, 0.2, 0.5, 1, 2, 5, 10) if wide else (0.5, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3)
    ticks = [tick for tick in ticks if low <= tick <= high]
    panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlim(low, high)


def _what(rate: float) -> str:
    return f"paired by seed; full: at rate {rate:g}, open: over the rates"


# --- Marks -------------------------------------------------------------------------------------


def _levels(panel: Any) -> None:
    """Mark the AUC levels readable, half gone and gone on the y axis."""
    for level, text in ((READABLE, "readable"), (HALF, "half"), (GONE, "gone")):
        panel.axhline(level, color="#444444", linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        panel.annotate(text, (1, level), xycoords=("axes fraction", "data"), ha="left",
                       xytext=(3, 0), textcoords="offset points", va="center", fontsize=8,
                       color="#444444")  # fmt: skip
    panel.set_ylim(0.45, 1.02)


def _with_bars(
    panel: Any,
    x: Sequence[float | int],
    found: Sequence[Mapping[str, Any]],
    colour: str,
    label: str,
) -> None:
    """Plot means with intervals as error bars; a single seed has no interval."""
    means, low, high = _limits(found)
    # As lists: Matplotlib tests arrays of one element in a way that NumPy 2.0 deprecates.
    bars = [(means - low).tolist(), (high - means).tolist()]
    panel.errorbar(x, means, bars, color=colour, marker="o", markersize=4,
                   linewidth=1.4, elinewidth=1.1, capsize=2.5, label=label)  # fmt: skip


def _with_band(
    panel: Any,
    x: Sequence[float | int],
    found: Sequence[Mapping[str, Any]],
    colour: str,
    label: str,
    style: Any,
) -> None:
    """Plot means as a line, with intervals as a band."""
    means, low, high = _limits(found)
    panel.plot(x, means, color=colour, linewidth=1.4, linestyle=style, label=label)
    panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _published_at(
    panel: Any, x: Sequence[float | int], y: Sequence[float | int], colour: str
) -> None:
    """Plot published values as open circles."""
    panel.plot(x, y, linestyle="none", marker="o", markersize=8, markerfacecolor="none",
               color=colour, zorder=3)  # fmt: skip


def _limits(found: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means and both ends of their intervals: NaN without a mean, the mean without an
    interval."""
    means = [np.nan if one["mean"] is None else one["mean"] for one in found]
    both = [one["interval"] or (mean, mean) for one, mean in zip(found, means, strict=True)]
    low, high = np.array(both, np.float64).reshape(-1, 2).T
    return np.array(means, np.float64), low, high
