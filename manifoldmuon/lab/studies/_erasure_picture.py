"""The picture of the study of weight erasure, from the record alone."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manifoldmuon.lab._figures import COLOURS, dress, panels
from manifoldmuon.lab.studies._erasure_claims import DUALIZED, GRADIENT, PUBLISHED_ACCURACY
from manifoldmuon.lab.studies._erasure_marks import levels, published_at, with_bars
from manifoldmuon.lab.studies._erasure_methods import RETRACTIONS, split
from manifoldmuon.lab.studies._erasure_pairs_picture import (
    curves,
    differences,
    shown_rate,
    speedups,
)

FREE = {
    DUALIZED: COLOURS[0],
    "dualized:exact": COLOURS[5],
    GRADIENT: COLOURS[3],
    "adam": COLOURS[7],
    "gradient": COLOURS[6],
}
"""The methods without a constraint."""


def picture(record: Mapping[str, Any]) -> Any:
    """Accuracy, erasure and stable ranks beside the published ones; constraints and their twins.

    What was not measured has no panel.
    """
    summary = record["summary"]
    kinds = {split(run["method"])[0] for run in summary["runs"]}
    drawn: list[Callable[[Any], None]] = []
    if kinds - set(RETRACTIONS):
        drawn += [lambda panel: _accuracy(panel, summary), lambda panel: _erasure(panel, summary)]
    if summary["claims"][2]["measured"]:
        drawn.append(lambda panel: _ranks(panel, summary))
    if kinds & set(RETRACTIONS):
        drawn.append(lambda panel: curves(panel, record))
    if summary["constraints"]:
        rate = shown_rate([pair["rate"] for pair in summary["constraints"]])
        drawn.append(lambda panel: speedups(panel, summary, rate))
        drawn.append(lambda panel: differences(panel, summary, rate))
    # The last two share their labels, and stay in one row: 2 x 2, 2 x 3.
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
        published_at(panel, here, [published[rate] for rate in here], FREE[name])
    panel.set_ylim(0, 1.05)
    size = "" if summary["protocol"]["published_size"] else ", at width 1024 after 1001 steps"
    dress(panel, "Learning", f"open circles: published{size}", "learning rate",
          "training accuracy")  # fmt: skip


def _erasure(panel: Any, summary: Mapping[str, Any]) -> None:
    _by_rate(panel, summary["runs"], "auc")
    levels(panel)
    dress(panel, "Erasure", "at the end of training; 1 is a sharp letter, 0.5 none",
          "learning rate", "AUC of |W| as a sign of the mask")  # fmt: skip


def _by_rate(panel: Any, runs: Sequence[Mapping[str, Any]], what: str) -> None:
    every = []
    for name, colour in FREE.items():
        found = [run for run in runs if split(run["method"]) == split(name) and run["rate"] > 0]
        if found:
            rates = [run["rate"] for run in found]
            with_bars(panel, rates, [run[what] for run in found], colour, name)
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
        with_bars(panel, widths, [at[kind] for at in claim["measured"].values()], colour, label)
        known = {int(w): ranks[kind] for w, ranks in claim["published"].items() if kind in ranks}
        published_at(panel, list(known), list(known.values()), colour)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(widths, [str(width) for width in widths])
    panel.minorticks_off()
    panel.legend(frameon=False, fontsize=8, loc="upper left")
    dress(panel, "Stable rank of the first update", "open circles: published", "width",
          "stable rank")  # fmt: skip
