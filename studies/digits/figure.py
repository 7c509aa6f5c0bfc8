"""Figure of the main job: loss, accuracy, singular values and certificates over the steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from studies.digits.loop import Run
from studies.digits.methods import METHODS
from studies.digits.settings import Settings
from studies.records import whole

# Colour-blind-safe colours by Okabe and Ito.
_COLOURS = {"adamw": "#767676", "muon": "#E69F00", "sphere": "#009E73", "stiefel": "#0072B2"}
_CERTIFICATES = {"gap": "#D55E00", "residual": "#CC79A7", "distance": "#0072B2"}


def picture(settings: Settings, runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Plot loss, test accuracy, singular values and certificates over the steps."""
    figure = Figure(figsize=(10, 7.2), dpi=150, layout="constrained")
    (loss, accuracy), (singular, certificates) = figure.subplots(2, 2)
    _losses(loss, runs)
    _accuracies(accuracy, runs)
    _singular_values(singular, runs)
    _certificates(certificates, runs)
    for panel in (loss, accuracy, singular, certificates):
        panel.set_xlabel("step")
        panel.set_xlim(0, settings.steps)
        panel.grid(color="#e2e2e2", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the figure atomically: a failure leaves no partial file."""
    with whole(path) as temporary:
        figure.savefig(temporary, format="png")


def _losses(panel: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    for name, found in runs.items():
        _mean(panel, name, found, np.array([run.train_loss for run in found]))
    panel.set_yscale("log")
    panel.set_ylabel("cross-entropy (nats)")
    _title(panel, "Training loss", "mean and standard error over the seeds")


def _accuracies(panel: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    late = []
    for name, found in runs.items():
        curves = 100 * np.array([run.test_accuracy for run in found])
        _mean(panel, name, found, curves)
        late.append(curves.mean(axis=0)[-(-curves.shape[1] // 3) :].min())
    # Zoom in on the end, where good optimizers differ, ignoring the start and optimizers that
    # stay far behind.
    best = max(late)
    low = min(value for value in late if 100 - value <= 3 * (100 - best) + 1)
    panel.set_ylim(max(0.0, low - 0.2 * (100 - low) - 0.2), 100)
    panel.set_ylabel("correct (%)")
    _title(panel, "Test accuracy", "mean and standard error over the seeds")


def _singular_values(panel: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    for name, found in runs.items():
        largest = np.array([run.largest for run in found]).max(axis=0)
        smallest = np.array([run.smallest for run in found]).min(axis=0)
        colour = _COLOURS[name]
        panel.fill_between(found[0].step, smallest, largest, color=colour, alpha=0.12, linewidth=0)
        for edge in (largest, smallest):
            panel.plot(found[0].step, edge, color=colour, linewidth=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # not 2 x 10^0
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("singular value")
    _title(panel, "Singular values of the weights", "the range over all layers and seeds")


def _certificates(panel: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    constrained = [name for name in ("stiefel", "sphere") if name in runs]
    if not constrained:
        panel.text(0.5, 0.5, "no constrained weights", ha="center", va="center",
                   transform=panel.transAxes, color="#767676")  # fmt: skip
        panel.set_yticks([])
        return
    found = runs[constrained[0]]
    for what, colour in _CERTIFICATES.items():
        worst = np.array([getattr(run, what) for run in found]).max(axis=0)
        if (worst > 0).any():  # a closed form has no gap, and a logarithm no zero
            panel.plot(found[0].step[1:], worst, color=colour, linewidth=2, label=what)
    panel.axhline(1e-5, color="#444444", linewidth=1, linestyle=(0, (4, 3)))
    panel.annotate("promised for the distance", (0.985, 1e-5), xytext=(0, 3), ha="right",
                   xycoords=("axes fraction", "data"), textcoords="offset points",
                   fontsize=8, color="#444444")  # fmt: skip
    panel.set_yscale("log")
    panel.set_ylabel("largest of all layers and seeds")
    panel.legend(loc="upper right", frameon=False, ncols=3, fontsize=9)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * 4)
    _title(
        panel, f"Certificates of {METHODS[constrained[0]].label}", "the worst step of each stretch"
    )


def _mean(panel: Axes, name: str, found: Sequence[Run], curves: np.ndarray) -> None:
    """Plot the mean over the seeds, with a band of one standard error."""
    mean, steps, colour = curves.mean(axis=0), found[0].step, _COLOURS[name]
    panel.plot(steps, mean, color=colour, linewidth=2, label=METHODS[name].label)
    if len(curves) > 1:
        error = curves.std(axis=0, ddof=1) / np.sqrt(len(curves))
        panel.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)


def _title(panel: Axes, title: str, subtitle: str) -> None:
    panel.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold")
    panel.annotate(subtitle, (0, 1), xytext=(0, 5), xycoords="axes fraction",
                   textcoords="offset points", fontsize=8.5, color="#555555")  # fmt: skip
