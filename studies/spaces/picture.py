"""The picture of the weight spaces, from the record alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from studies.display import COLOURS, dress, panels
from studies.estimates import half_width
from studies.spaces.sets import SETS
from studies.study import Record


def picture(record: Record) -> Any:
    """Plot losses relative to Muon, losses against the rate, and singular values, with a row for
    each network."""
    summary = record["summary"]
    figure, grid = panels(len(summary), 3, width=5.0, height=3.9)
    for (beyond, curves, values), (network, found) in zip(grid, summary.items(), strict=True):
        data = record["settings"]["text" if network == "gpt" else "images"]
        sets = found["sets"]
        palette = dict(zip(SETS, [COLOURS[-1], *COLOURS[:-1], "#882255", "#999933"], strict=True))
        colours = {name: palette[name] for name in sets}
        _beyond(beyond, sets, colours)
        dress(beyond, f"{network}, {data}", "each set at its best rate, paired by seed, 95 %",
              "held-out loss beyond Muon's (nats)", "")  # fmt: skip
        rows = [r for r in record["rows"] if r["network"] == network and r["part"] == "base"]
        for name, colour in colours.items():
            own = [row for row in rows if row["set"] == name]
            losses = np.array([row["held_out_losses"] for row in own], np.float64).mean(axis=0)
            curves.plot(own[0]["log2_rates"], losses, "o-", color=colour, markersize=3,
                        linewidth=1.4, label=name)  # fmt: skip
        best = min(s["held_out_losses"]["mean"] for s in sets.values())
        curves.set_ylim(best - 0.05, best + 0.75)
        curves.set_xticks(rows[0]["log2_rates"])
        curves.legend(frameon=False, fontsize=7)
        dress(curves, "Sensitivity to the rate", "means over seeds", "log2 of the learning rate",
              "held-out loss")  # fmt: skip
        _ranges(values, sets, colours)
        dress(values, "Singular values at the end", "smallest (from 0.001), median and largest of "
              "all hidden matrices", "relative to the scale", "")  # fmt: skip
    return figure


def _beyond(panel: Any, sets: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    panel.axvline(0, color="#444444", linewidth=1)
    for y, (name, found) in enumerate(sets.items()):
        over = found["held_out_losses"]["over_muon"]
        panel.errorbar([over["mean"]], [y], xerr=half_width(over["interval"]), fmt="o", capsize=3,
                       color=colours[name], markersize=5, elinewidth=1.3)  # fmt: skip
    panel.set_yticks(range(len(sets)), list(sets))
    panel.invert_yaxis()


def _ranges(panel: Any, sets: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    for y, (name, found) in enumerate(sets.items()):
        spectra = found["spectra"]
        if None in spectra.values():  # a training diverged
            continue
        panel.plot([max(spectra["smallest"], 1e-3), spectra["largest"]], [y, y], "|-",
                   color=colours[name], linewidth=1.6, markersize=9)  # fmt: skip
        panel.plot([spectra["median"]], [y], "o", color=colours[name], markersize=5)
    panel.set_xscale("log")
    lowest = min(max(found["spectra"]["smallest"] or 1, 1e-3) for found in sets.values())
    highest = max(found["spectra"]["largest"] or 1 for found in sets.values())
    ticks = [x for x in (1e-3, 0.01, 0.1, 0.3, 1, 3, 10, 30) if lowest / 2 < x < 2 * highest]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(range(len(sets)), list(sets))
    panel.invert_yaxis()
