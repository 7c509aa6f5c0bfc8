"""Low-precision momentum: its cost in the loss of a small transformer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optax

from manifoldmuon.contrib import quantized
from studies.datasets import TEXTS
from studies.display import COLOURS, dress, legend_above, panels, text_table
from studies.estimates import estimate, half_width, shown
from studies.study import Cell, Record, Row, Study, option
from studies.transformers.methods import METHODS
from studies.transformers.network import Size
from studies.transformers.search import Place
from studies.transformers.study import SIZES
from studies.transformers.training import Task, held_out_loss, train

PLACES: dict[str, Place] = {
    "Muon": (0, 0, 0, 0),
    "stream vectors, gains": (0, -1, 1, 0),
    "Stiefel": (0, 1, 0, 0),
}
"""Knobs tuned by the study `transformers`, with momentum in float32."""

FULL = "float32"


def _few_bits(bits: int) -> Any:
    return lambda *args, **kwargs: quantized(optax.trace(*args, **kwargs), bits)


MOMENTA: dict[str, Any] = {
    FULL: optax.trace,
    "bfloat16": functools.partial(optax.trace, accumulator_dtype="bfloat16"),
    "8 bits": _few_bits(8),
    "4 bits": _few_bits(4),
}
"""Constructors of the momentum transformation, with the arguments of `optax.trace`."""


@dataclasses.dataclass(frozen=True)
class MomentumBits(Study):
    """What does momentum in bfloat16, 8 or 4 bits cost in loss?

    Trains the small character model of the study `transformers` with its tuned knobs. The momentum
    of the hidden matrices is in float32, in bfloat16, or in 8 or 4 bits by `contrib.quantized`.
    Differences from float32 are paired by seed.
    """

    name: ClassVar[str] = "momentum-bits"

    # fmt: off
    methods: tuple[str, ...] = option(
        tuple(PLACES), "of the hidden matrices", choices=tuple(PLACES))
    momenta: tuple[str, ...] = option(
        tuple(MOMENTA), "how momentum is kept, float32 among them", choices=tuple(MOMENTA))
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "of the first weights and of the batches")
    size: str = option("small", "of the network", choices=tuple(SIZES))
    steps: int = option(300, "of a training")
    momentum: float = option(0.0, "instead of the tuned one; 0: that one")
    text: str = option("pydoc", "to train on", choices=TEXTS)
    data_dir: Path | None = option(None, "with the file of the text", recorded=False)
    batch: int = option(16, "windows of a step")
    context: int = option(64, "characters of a window")
    held_out: int = option(256, "windows of the held-out part")
    # fmt: on

    def __post_init__(self):
        counts = (self.steps, self.batch, self.context, self.held_out)
        if not self.methods or not self.seeds or min(counts) < 1:
            raise ValueError(f"needs methods, seeds, steps and windows; got {self}")
        if FULL not in self.momenta:
            raise ValueError(f"{FULL} must be among the momenta; got {self.momenta}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1); got {self.momentum}")

    def cells(self) -> Sequence[Cell]:
        return [
            {"method": method, "momentum_in": kept, "seed": seed}
            for method in self.methods
            for kept in self.momenta
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        task = Task(self.text, self.data_dir, self.batch, self.context, self.held_out)
        size = Size(*SIZES[self.size], len(task.text().characters))
        method = METHODS[cell["method"]]
        knobs = method.knobs(PLACES[cell["method"]])
        if self.momentum:
            knobs = knobs._replace(momentum=self.momentum)
        trace = MOMENTA[cell["momentum_in"]]
        weights, losses = train(method.program, size, task, self.steps, cell["seed"], knobs, trace)
        return {
            "loss": held_out_loss(weights, task),
            "train_loss": float(losses[-(self.steps // 6 or 1) :].mean()),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method]
            losses = {
                kept: {
                    key: np.array(
                        [row[key] for row in own if row["momentum_in"] == kept], np.float64
                    )
                    for key in ("loss", "train_loss")
                }
                for kept in dict.fromkeys(row["momentum_in"] for row in own)
            }
            found[method] = {
                kept: {
                    "loss": estimate(values["loss"]),
                    "beyond": estimate(values["loss"] - losses[FULL]["loss"]),
                    "train_beyond": estimate(values["train_loss"] - losses[FULL]["train_loss"]),
                }
                for kept, values in losses.items()
            }
        return found

    def table(self, record: Record) -> str:
        header = ["", "momentum", "held-out loss", f"beyond {FULL}", "training loss beyond"]
        lines = []
        for method, momenta in record["summary"].items():
            for kept, found in momenta.items():
                beyond = [
                    "" if kept == FULL else shown(found[key], "+.4f")
                    for key in ("beyond", "train_beyond")
                ]
                lines.append([method, kept, shown(found["loss"], ".3f"), *beyond])
        return text_table(header, lines)

    def plot(self, record: Record) -> Any:
        figure, [[panel]] = panels(1, 1, width=6.0, height=3.6)
        summary = record["summary"]
        names = [kept for kept in next(iter(summary.values())) if kept != FULL]
        for i, (method, momenta) in enumerate(summary.items()):
            found = [momenta[kept]["beyond"] for kept in names]
            across = np.arange(len(names)) + 0.12 * (i - (len(summary) - 1) / 2)
            errors = [half_width(one["interval"]) or 0.0 for one in found]
            panel.errorbar(
                across, [one["mean"] for one in found], errors, fmt="o", capsize=3,
                color=COLOURS[i], label=method,
            )  # fmt: skip
        panel.axhline(0, color="#444444", linewidth=1)
        panel.set_xticks(range(len(names)), names)
        legend_above(figure, panel)
        dress(panel, "Momentum in few bits", f"beyond momentum in {FULL}; 95 % intervals",
              "momentum in", "held-out loss (nats)")  # fmt: skip
        return figure
