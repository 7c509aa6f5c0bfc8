"""The picture of the transformers, from the record alone."""

from typing import Any

from studies.display import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    dress,
    legend_above,
    panels,
)
from studies.estimates import half_width
from studies.study import Record
from studies.transformers.methods import MUON

KINDS = {
    "NorMuonH": BLUE, "AuroraH": BLUE, "MuonH": BLUE, "AdamH": SKY, "AdamW": GREY,
    MUON: BLACK, "NorMuon": BLACK, "Aurora": BLACK, "rows": GREEN, "stream": PURPLE,
    "spectral": ORANGE, "band": ORANGE, "Stiefel": ORANGE,
}  # fmt: skip
"""Colours by prefix of the method's name; the first match counts."""


def picture(record: Record) -> Any:
    """Plot losses relative to Muon and the cost of rounding, with a row for each size and length;
    then rates by width."""
    found = record["summary"]
    losses, widths = found["losses"], found["widths"]
    figure, grid = panels(len(losses) + bool(widths), 2, width=5.0, height=3.6)
    for (beyond, bits), (title, methods) in zip(grid, losses.items(), strict=False):
        names = sorted(methods, key=lambda name: methods[name]["loss"]["mean"] or 1e9)
        best = methods[MUON]["loss"]["mean"]
        beyond.axvline(0, color="#444444", linewidth=1)
        reach = sorted(abs(methods[name]["over_muon"]["mean"] or 0) for name in names)
        limit = max(0.02, 3 * reach[len(reach) // 2])
        ends = (methods[name]["over_muon"]["interval"] or [0] for name in names
                if abs(methods[name]["over_muon"]["mean"] or 0) < limit)  # fmt: skip
        shown = max(limit, *(1.05 * abs(end or 0) for interval in ends for end in interval))
        for y, name in enumerate(names):
            over, colour = methods[name]["over_muon"], _colour(name)
            value = over["mean"]
            if value is not None and abs(value) < limit:
                beyond.errorbar([value], [y], xerr=half_width(over["interval"]), fmt="o",
                                color=colour, capsize=3, markersize=5)  # fmt: skip
            elif value is not None:
                beyond.annotate(f"{value:+.3f} →", (0.99, y), xycoords=("axes fraction", "data"),
                                ha="right", va="center", fontsize=8, color=colour)  # fmt: skip
            for kind, marker in (("bits4", "o"), ("nvfp4", "s"), ("bits3", "^")):
                cost = methods[name]["rounded"][kind]["mean"]
                if cost is not None and cost > 0:
                    bits.plot([cost], [y], marker, color=colour, markersize=5)
        beyond.set_xlim(-shown, shown)
        beyond.locator_params(axis="x", nbins=6)
        for panel in (beyond, bits):
            panel.set_yticks(range(len(names)), names)
            panel.set_ylim(len(names) - 0.5, -0.5)
        bits.set_xscale("log")
        bits.tick_params(axis="x", which="minor", labelbottom=False)
        dress(beyond, title, f"Muon with tuned weight decay: {best:.3f}; paired by seed, 95 %",
              "held-out loss beyond Muon's (nats)", "")  # fmt: skip
        dress(bits, "Cost of rounding", "4 bits (circle), NVFP4 (square), 3 bits (triangle)",
              "rise of the held-out loss (nats)", "")  # fmt: skip
    if widths:
        rates, level = grid[-1]
        for name, own in widths.items():
            x = [int(width) for width in own]
            colour, line = _colour(name), "--" if "gains" in name else "-"
            y = [at["log2_rate"] for at in own.values()]
            first = next((value for value in y if value is not None), 0.0)
            moved = [None if value is None else value - first for value in y]
            rates.plot(x, moved, "o" + line, color=colour, label=name)  # type: ignore
            level.plot(x, [at["loss"] for at in own.values()], "o" + line, color=colour)
        for panel in (rates, level):
            panel.set_xscale("log", base=2)
            panel.set_xticks(x, [str(width) for width in x])
        rates.axhspan(-0.25, 0.25, color="#eeeeee", zorder=0)
        legend_above(figure, rates)
        dress(rates, "The best rate over widths", "octaves from that of the least width; grey: a "
              "quarter", "width", "octaves")  # fmt: skip
        dress(level, "Loss at the best rate", "mean over seeds", "width", "held-out loss")
    return figure


def _colour(name: str) -> str:
    return next(colour for start, colour in KINDS.items() if name.startswith(start))
