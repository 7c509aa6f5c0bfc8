"""Figure of the main job: loss, accuracy, singular values and gaps over the steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.digits.methods import METHODS
from studies.display import BLUE, GREY, ORANGE, PURPLE, dress, legend_above, panels
from studies.estimates import mean_estimate
from studies.study import Record, Row

_COLOURS = {"adamw": GREY, "muon": ORANGE, "sphere": PURPLE, "stiefel": BLUE}
_WATCHED = {"gap": "-", "residual": "--", "distance": ":"}


def picture(record: Record) -> Any:
    """Plot loss, test accuracy, singular values, and distances and gaps over the steps."""
    runs = {
        name: [row for row in record["rows"] if row["optimizer"] == name]
        for name in record["summary"]
    }
    figure, [(loss, accuracy), (singular, watched)] = panels(2, 2, width=5.0, height=3.6)
    _losses(loss, runs)
    _accuracies(accuracy, runs)
    _singular_values(singular, runs)
    _watched(watched, runs)
    for panel in (loss, accuracy, singular, watched):
        panel.set_xlim(0, record["settings"]["steps"])
    legend_above(figure, loss)
    return figure


def _losses(panel: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    for name, found in runs.items():
        _mean(panel, name, found, _curves(found, "train_loss"))
    panel.set_yscale("log")
    dress(panel, "Training loss", "mean and 95 % interval over the seeds", "step",
          "cross-entropy (nats)")  # fmt: skip


def _accuracies(panel: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    late = []
    for name, found in runs.items():
        curves = 100 * _curves(found, "test_accuracy")
        _mean(panel, name, found, curves)
        late.append(curves.mean(axis=0)[-(-curves.shape[1] // 3) :].min())
    # Zoom in on the end, where good optimizers differ, ignoring the start and optimizers that
    # stay far behind.
    best = max(late)
    low = min(value for value in late if 100 - value <= 3 * (100 - best) + 1)
    panel.set_ylim(max(0.0, low - 0.2 * (100 - low) - 0.2), 100)
    dress(panel, "Test accuracy", "mean and 95 % interval over the seeds", "step", "correct (%)")


def _singular_values(panel: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    for name, found in runs.items():
        largest, smallest = _curves(found, "largest").max(0), _curves(found, "smallest").min(0)
        steps, colour = found[0]["step"], _COLOURS[name]
        panel.fill_between(steps, smallest, largest, color=colour, alpha=0.12, linewidth=0)
        for edge in (largest, smallest):
            panel.plot(steps, edge, color=colour, linewidth=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # not 2 x 10^0
    panel.yaxis.set_minor_locator(NullLocator())
    dress(panel, "Singular values of the weights", "the range over all layers and seeds", "step",
          "singular value")  # fmt: skip


def _watched(panel: Any, runs: Mapping[str, Sequence[Row]]) -> None:
    constrained = [name for name in ("stiefel", "sphere") if name in runs]
    if not constrained:
        panel.text(0.5, 0.5, "no constrained weights", ha="center", va="center",
                   transform=panel.transAxes, color=GREY)  # fmt: skip
        panel.set_yticks([])
        return
    found, colour = runs[constrained[0]], _COLOURS[constrained[0]]
    for what, line in _WATCHED.items():
        worst = _curves(found, what).max(axis=0)
        if (worst > 0).any():  # a closed form has no gap, and a logarithm no zero
            panel.plot(found[0]["step"][1:], worst, line, color=colour, linewidth=2, label=what)
    panel.axhline(1e-5, color="#444444", linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate("promised for the distance", (0.985, 1e-5), xytext=(0, 3), ha="right",
                   xycoords=("axes fraction", "data"), textcoords="offset points",
                   fontsize=8, color="#444444")  # fmt: skip
    panel.set_yscale("log")
    panel.legend(loc="upper right", frameon=False, ncols=3, fontsize=9)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * 4)
    dress(panel, f"Directions of {METHODS[constrained[0]].label}", "the worst step of each stretch",
          "step", "largest of all layers and seeds")  # fmt: skip


def _curves(found: Sequence[Row], what: str) -> np.ndarray:
    return np.array([run[what] for run in found], np.float64)


def _mean(panel: Any, name: str, found: Sequence[Row], curves: np.ndarray) -> None:
    """Plot the mean over the seeds, with a band of 95 % intervals."""
    mean, steps, colour = curves.mean(axis=0), found[0]["step"], _COLOURS[name]
    panel.plot(steps, mean, color=colour, linewidth=2, label=METHODS[name].label)
    if len(curves) > 1:
        low, high = np.array([mean_estimate(values).interval for values in curves.T]).T
        panel.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
