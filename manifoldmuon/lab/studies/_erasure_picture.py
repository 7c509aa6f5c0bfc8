"""The picture of the study of weight erasure: four panels, from the record alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manifoldmuon.lab._figures import COLOURS, dress, panels
from manifoldmuon.lab.studies._erasure_findings import (
    DUALIZED,
    GONE,
    GRADIENT,
    PUBLISHED_ACCURACY,
    READABLE,
)
from manifoldmuon.lab.studies._erasure_methods import FLAT, split

LOOKS = {
    GRADIENT: COLOURS[3],
    DUALIZED: COLOURS[0],
    "dualized:exact": COLOURS[5],
    "stiefel": COLOURS[2],
    "hypersphere": COLOURS[1],
    "rows": COLOURS[4],
}
"""A colour for the methods of the published experiment, and one for each constraint."""


def picture(record: Mapping[str, Any]) -> Any:
    """Accuracy, erasure and stable ranks beside the published ones; constraints and their twins."""
    figure, [(accuracy, erasure), (constraints, ranks)] = panels(2, 2, width=5.6, height=4.0)
    runs = record["summary"]["runs"]
    _by_rate(accuracy, runs, "train_accuracy")
    for name, published in PUBLISHED_ACCURACY.items():
        rates = {run["rate"] for run in runs if run["method"] == name}
        here = [rate for rate in published if rate in rates]
        accuracy.plot(here, [published[rate] for rate in here], linestyle="none", marker="o",
                      markersize=8, markerfacecolor="none", color=LOOKS[name])  # fmt: skip
    _by_rate(erasure, runs, "auc")
    for level, text in ((READABLE, "readable"), (GONE, "gone")):
        erasure.axhline(level, color="#444444", linewidth=0.9, linestyle=(0, (4, 3)))
        erasure.annotate(text, (1, level), xycoords=("axes fraction", "data"), ha="right",
                         va="bottom", fontsize=8, color="#444444")  # fmt: skip
    rate = _shown_rate(runs)
    _over_steps(constraints, record["rows"], rate)
    _by_width(ranks, record["summary"]["claims"][2])
    handles, labels = erasure.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    dress(accuracy, "Learning", "open circles: published, at width 1024 after 1001 steps",
          "learning rate", "training accuracy")  # fmt: skip
    dress(erasure, "Erasure", "at the end of training; 1 is a sharp letter, 0.5 none",
          "learning rate", "AUC of |W| as a sign of the mask")  # fmt: skip
    dress(constraints, "Constraints",
          f"at rate {rate:g}; dashed: the same norm and start without the constraint",
          "steps", "AUC of |W| as a sign of the mask")  # fmt: skip
    dress(ranks, "Stable rank of the first update", "open circles: published",
          "width", "stable rank")  # fmt: skip
    return figure


def _by_rate(panel: Any, runs: Sequence[Mapping[str, Any]], what: str) -> None:
    for label, colour in LOOKS.items():
        name = _shown(label, [run["method"] for run in runs])
        found = [(run["rate"], run[what]) for run in runs if run["method"] == name and run["rate"]]
        if found:
            x, y = zip(*found, strict=True)
            panel.plot(x, [np.nan if value is None else value for value in y], color=colour,
                       marker="o", markersize=4, label=name)  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_ylim(0.0 if what == "train_accuracy" else 0.47, 1.03)


def _over_steps(panel: Any, rows: Sequence[Mapping[str, Any]], rate: float | None) -> None:
    """The curves of the first seed at one rate: a constraint in full, its twin dashed."""
    seen = set()
    for row in rows:
        if row["part"] != "run" or row["rate"] != rate:
            continue
        kind, variant = split(row["method"])
        if kind not in LOOKS or (row["method"], "seen") in seen:
            continue
        seen.add((row["method"], "seen"))
        style: dict[str, Any] = {"linestyle": (0, (4, 2)) if variant == FLAT else "-"}
        values = [np.nan if value is None else value for value in row["auc"]]
        panel.plot(row["step"], values, color=LOOKS[kind], linewidth=1.3, **style)
    panel.set_xscale("symlog", linthresh=1)
    panel.set_xlim(left=0)
    panel.set_ylim(0.47, 1.03)


def _by_width(panel: Any, claim: Mapping[str, Any]) -> None:
    kinds = {"gradient": GRADIENT, "six_steps": DUALIZED, "exact": "dualized:exact"}
    for kind, name in kinds.items():
        widths = [int(width) for width in claim["measured"]]
        values = [ranks[kind] for ranks in claim["measured"].values()]
        panel.plot(widths, values, color=LOOKS[name], marker="o", markersize=4)
        known = {int(w): ranks[kind] for w, ranks in claim["published"].items() if kind in ranks}
        panel.plot(list(known), list(known.values()), linestyle="none", marker="o", markersize=8,
                   markerfacecolor="none", color=LOOKS[name])  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")


def _shown(label: str, methods: Sequence[str]) -> str | None:
    """A method of the published experiment, or the first retraction of a constraint."""
    if ":" in label or label == GRADIENT:
        return label if label in methods else None
    own = (name for name in methods if split(name)[0] == label and split(name)[1] != FLAT)
    return next(own, None)


def _shown_rate(runs: Sequence[Mapping[str, Any]]) -> float:
    """The rate at which constraints are shown: 1/4 if there is one, else the lowest of all."""
    rates = [run["rate"] for run in runs if split(run["method"])[0] in LOOKS]
    return 0.25 if 0.25 in rates or not rates else min(rates)
