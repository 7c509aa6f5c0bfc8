"""The panels of weight erasure that compare constrained methods with their twins."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from manifoldmuon.lab._figures import COLOURS, dress
from manifoldmuon.lab.studies._erasure_marks import levels, with_band
from manifoldmuon.lab.studies._erasure_methods import FLAT, split
from manifoldmuon.lab.studies._erasure_runs import estimate

SPACES = {
    "stiefel": COLOURS[2],
    "orthogonal": COLOURS[0],
    "hypersphere": COLOURS[1],
    "rows": COLOURS[4],
}

TWIN = (0, (4, 2))
"""The dashes of methods without their constraint."""


def curves(panel: Any, record: Mapping[str, Any]) -> None:
    """The AUC over the steps: the first retraction of each manifold in full, its twin dashed."""
    runs = [row for row in record["rows"] if row["part"] == "run"]
    rate = shown_rate([row["rate"] for row in runs if split(row["method"])[0] in SPACES])
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
        with_band(panel, seeds[0]["step"], found, SPACES[kind], method, style)
    levels(panel)
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xlim(left=0)
    panel.legend(frameon=False, fontsize=8, loc="lower left")
    dress(panel, "Constraints", f"at rate {rate:g}; dashed: the same norm and start, unconstrained",
          "steps", "AUC of |W| as a sign of the mask")  # fmt: skip


def speedups(panel: Any, summary: Mapping[str, Any], rate: float) -> None:
    _forest(panel, summary, "speedup", rate)
    panel.axvline(1, color="#444444", linewidth=0.9)
    _ratio_axis(panel)
    dress(panel, "Speed-up by the constraint", _what(rate),
          "half-life of the twin / half-life; none: not half gone, or lost", "")  # fmt: skip


def differences(panel: Any, summary: Mapping[str, Any], rate: float) -> None:
    _forest(panel, summary, "auc_difference", rate)
    panel.tick_params(labelleft=False)
    panel.locator_params(axis="x", nbins=6)
    panel.axvline(0, color="#444444", linewidth=0.9)
    dress(panel, "What the constraint leaves of the letter", _what(rate),
          "AUC at the end, less that of the twin", "")  # fmt: skip


def shown_rate(rates: Sequence[float]) -> float:
    """The rate at which constraints are shown: 1/4 if there is one, else the lowest."""
    return 0.25 if 0.25 in rates else min(rates)


def _forest(panel: Any, summary: Mapping[str, Any], what: str, rate: float) -> None:
    """A line for each method with a twin: at one rate, and over all where there are more."""
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
    """Logarithmic, with ticks at round numbers; what lies beyond a factor of 10 is cut off."""
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
