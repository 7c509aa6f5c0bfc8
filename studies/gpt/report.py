"""Table, record and figure of the character GPT."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.datasets import Text
from studies.display import text_table
from studies.estimates import Mean
from studies.gpt.methods import METHODS
from studies.gpt.settings import Settings
from studies.gpt.training import PUBLISHED_WINDOWS, Run

SHAKESPEARE = {"last_train_loss": 1.7122, "validation_first_windows": 1.8968}
"""Losses that the Modula package publishes for tiny Shakespeare, for a single seed."""

LOSSES = {
    "last_train_loss": "train, the last batch",
    "late_train_loss": "train, the last 100 batches",
    "validation_first_windows": f"validation, the first {PUBLISHED_WINDOWS} windows",
    "validation_whole": "validation, the whole part",
}
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#767676")


def published_losses(text: Text) -> dict[str, float]:
    """Return the published losses on this text; empty for other texts."""
    return SHAKESPEARE if text.name == "tiny Shakespeare" else {}


def table(settings: Settings, text: Text, runs: Sequence[Run]) -> str:
    """Return a table of every seed's losses, their means, and the published losses."""
    rates = f"learning rate {METHODS[settings.optimizer].rate(settings):g}"
    title = (
        f"{METHODS[settings.optimizer].label} on {text.name}: {settings.steps} steps of "
        f"{settings.batch} windows of {settings.context} characters, {rates}"
    )
    header = ["cross-entropy (nats)", *(f"seed {run.seed}" for run in runs), "mean", "published"]
    rows = []
    for name, label in LOSSES.items():
        values = [getattr(run, name) for run in runs]
        published = published_losses(text).get(name)
        rows.append(
            [label, *(f"{value:.4f}" for value in values), Mean.of(values).text(".4f"),
             "-" if published is None else f"{published:.4f}"]
        )  # fmt: skip
    cells = text_table(header, rows)
    pace = np.median([run.milliseconds_per_step for run in runs])
    notes = [f"{pace:.1f} ms/step, {settings.batch * settings.context / pace * 1e3:,.0f} tokens/s"]
    distances = [run.distance for run in runs if run.distance is not None]
    if distances:
        notes.append(f"largest distance from the manifolds after any step: {np.max(distances):.1e}")
    rule = cells.splitlines()[1]
    return "\n".join([title, rule, cells, rule, *notes])


def as_record(settings: Settings, text: Text, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the full record."""
    summary = {}
    for name, label in LOSSES.items():
        mean = Mean.of([getattr(run, name) for run in runs])
        summary[name] = {"what": label, "published": published_losses(text).get(name),
                         **dataclasses.asdict(mean)}  # fmt: skip
    pace = float(np.median([run.milliseconds_per_step for run in runs]))
    distances = [run.distance for run in runs if run.distance is not None]
    return {
        "what": "the character GPT; losses are cross-entropies in nats",
        "settings": settings.as_record(),
        "label": METHODS[settings.optimizer].label,
        "learning_rate": METHODS[settings.optimizer].rate(settings),
        "text": text.name,
        "characters": len(text.characters),
        "summary": summary,
        "largest_distance": float(np.max(distances)) if distances else None,
        "milliseconds_per_step": pace,
        "tokens_per_second": 1e3 * settings.batch * settings.context / pace,
        "runs": [_run_as_record(run) for run in runs],
    }


def _run_as_record(run: Run) -> dict[str, Any]:
    losses = {name: getattr(run, name) for name in LOSSES}
    return losses | dataclasses.asdict(run)


def from_record(record: dict[str, Any]) -> list[Run]:
    """Return the runs of a record."""
    names = [field.name for field in dataclasses.fields(Run)]
    return [Run(**{name: run[name] for name in names}) for run in record["runs"]]


def picture(settings: Settings, text: Text, runs: Sequence[Run]) -> Figure:
    """Plot training and validation loss over the steps, with a colour per seed."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    panel = figure.subplots()
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        panel.plot(*_smooth(run.train_loss), color=colour, linewidth=1.2, alpha=0.6,
                   label=f"train, seed {run.seed}")  # fmt: skip
        panel.plot(run.step, run.validation_curve, color=colour, linewidth=2, marker="o",
                   markersize=3, label=f"validation, seed {run.seed}")  # fmt: skip
    if published := published_losses(text):
        panel.axhline(published["validation_first_windows"], color="#444444", linewidth=1,
                      linestyle=(0, (4, 3)), label="validation, published")  # fmt: skip
    panel.set_xlabel("step")
    panel.set_ylabel("cross-entropy (nats)")
    panel.set_xlim(0, settings.steps)
    panel.grid(color="#e2e2e2", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, ncols=2, fontsize=8)
    panel.set_title(f"{METHODS[settings.optimizer].label}, {text.name}", loc="left", fontsize=11,
                    fontweight="bold")  # fmt: skip
    return figure


def _smooth(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return means over groups of consecutive batches, and the groups' middle steps."""
    length = max(1, len(losses) // 60)
    groups = [losses[i : i + length] for i in range(0, len(losses), length)]
    middles = np.arange(len(groups)) * length + length / 2
    return middles, np.array([np.mean(group) for group in groups])
