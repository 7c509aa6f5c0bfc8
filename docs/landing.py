"""The picture of the landing page, from the record of `make train` over forty seeds."""

import json
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

_RECORD = Path(__file__).parents[1] / "studies" / "results" / "digits-40-seeds.json"
# Okabe and Ito's colours, as in the example's own picture.
_COLOURS = {"adamw": "#767676", "muon": "#E69F00", "sphere": "#009E73", "stiefel": "#0072B2"}


def draw(to: Path, record: Path = _RECORD) -> None:
    """Writes the picture: singular values over the steps, and accuracy beside the bound."""
    found = json.loads(record.read_text(encoding="utf-8"))
    figure = Figure(figsize=(8.4, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    _singular_values(left, found)
    _accuracies(right, found)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, format="svg", metadata={"Date": None})


def _singular_values(panel: Axes, record: dict) -> None:
    for name, runs in record["runs"].items():
        low = np.min([run["smallest"] for run in runs], axis=0)
        high = np.max([run["largest"] for run in runs], axis=0)
        steps, colour = runs[0]["step"], _COLOURS[name]
        panel.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        for edge in (low, high):
            panel.plot(steps, edge, color=colour, linewidth=2)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xlim(0, record["settings"]["steps"])
    panel.set(xlabel="step", title="Singular values of all weights")


def _accuracies(panel: Axes, record: dict) -> None:
    for name, row in record["summary"].items():
        accuracy, bound = row["test_accuracy"], row["lipschitz"]
        panel.errorbar(bound["mean"], accuracy["mean"], accuracy["error"], bound["error"],
                       fmt="o", color=_COLOURS[name], markersize=8)  # fmt: skip
        panel.annotate(row["label"], (bound["mean"], accuracy["mean"]), (9, 6),
                       textcoords="offset points", color=_COLOURS[name])  # fmt: skip
    panel.set(xlim=(0, 62), ylim=(97.9, 98.95), ylabel="test accuracy (%)",
              xlabel="bound on the Lipschitz constant",
              title="Accuracy and bound after training")  # fmt: skip
