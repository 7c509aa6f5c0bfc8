"""Transformers: does a constrained recipe beat Muon with tuned weight decay?"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from studies.datasets import TEXTS
from studies.study import Cell, Record, Row, Study, option
from studies.transformers.findings import summary, table
from studies.transformers.methods import METHODS, MUON, Knobs, Method
from studies.transformers.network import HEAD, Size
from studies.transformers.picture import picture
from studies.transformers.search import START, Place, best_place, search
from studies.transformers.training import Task, held_out_loss, measure, train

SIZES = {"small": (64, 2), "middle": (96, 4), "large": (192, 4), "tiny": (32, 1)}
"""Width and blocks: 0.1, 0.45 and 1.8 million parameters; `tiny` is for tests."""


@dataclasses.dataclass(frozen=True)
class Transformers(Study):
    """Does a constrained recipe beat Muon with tuned weight decay on a transformer?

    Trains character models (pre-norm, RMS norm without gains, rotary positions, query-key norm,
    ReLU^2) of several sizes and lengths. Each method trains the hidden matrices; Adam trains the
    other weights. Every method has four knobs (learning rate; weight decay or branch factor;
    momentum; learning rate of embedding and head) and the same number of trainings to tune them,
    with separate tuning seeds; then all seeds are trained with the best knobs. Differences from
    Muon with tuned weight decay are paired by seed. Also measured: losses after rounding weights to
    few bits, the kurtosis of activations, idle neurons, the range of good rates, and the best rates
    over widths.
    """

    name: ClassVar[str] = "transformers"

    # fmt: off
    sizes: tuple[str, ...] = option(("small",), "sizes of the network", choices=tuple(SIZES))
    lengths: tuple[int, ...] = option((300,), "steps of each training")
    methods: tuple[str, ...] = option(
        (MUON, "MuonH", "stream vectors, gains"),
        "methods for the hidden matrices, Muon among them", choices=tuple(METHODS))
    tries: int = option(10, "settings of the four knobs that tune a method")
    tuning_seeds: tuple[int, ...] = option(
        (100,), "seeds to tune with, by the mean loss; none of the seeds")
    start_from: str = option(
        "", "size from which searches at the other sizes start; none: all start the same way",
        choices=("", *SIZES))
    later_tries: int = option(
        4, "settings to try at the other sizes then, with the first tuning seed; 0: none")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "seeds of weights and batches")
    widths: tuple[int, ...] = option((), "widths to find the best rate at, with the first length")
    wide_methods: tuple[str, ...] = option(
        (), "methods to find the best rate of, at each width", choices=tuple(METHODS))
    wide_seeds: tuple[int, ...] = option((0, 1), "seeds at each width and rate")
    text: str = option("pydoc", "text to train on", choices=TEXTS)
    data_dir: Path | None = option(None, "folder with the text", recorded=False)
    batch: int = option(16, "windows per step")
    context: int = option(64, "characters per window")
    held_out: int = option(256, "held-out windows")
    runs: Path | None = option(
        None, "file that keeps every training, for other records that need it", recorded=False)
    # fmt: on

    def __post_init__(self):
        counts = (*self.lengths, self.tries, self.batch, self.context, self.held_out)
        if not self.lengths or min(counts) < 1:
            raise ValueError(f"lengths, tries, batch and windows must be at least 1; got {counts}")
        if self.later_tries < 0:
            raise ValueError(f"later_tries must be at least 0; got {self.later_tries}")
        if any(width < 1 or width % HEAD for width in self.widths):
            raise ValueError(f"widths must be multiples of {HEAD}; got {self.widths}")
        if MUON not in self.methods or not set(self.wide_methods) <= set(self.methods):
            raise ValueError(
                f"methods must include {MUON!r} and the wide_methods; got {self.methods} and "
                f"{self.wide_methods}"
            )
        seeds = (*self.seeds, *self.tuning_seeds)
        if not self.seeds or not self.tuning_seeds or len(set(seeds)) < len(seeds):
            raise ValueError(
                "seeds and tuning_seeds must all be different, and not empty; got "
                f"{self.seeds} and {self.tuning_seeds}"
            )

    def cells(self) -> Sequence[Cell]:
        main: list[Cell] = [
            {"part": "main", "size": size, "steps": steps, "method": method}
            for size in self.sizes
            for steps in self.lengths
            for method in self.methods
        ]
        wide: list[Cell] = [
            {"part": "width", "width": width, "steps": self.lengths[0], "method": method}
            for method in self.wide_methods
            for width in self.widths
        ]
        return main + wide

    def run(self, cell: Cell) -> Mapping[str, Any]:
        method, steps = METHODS[cell["method"]], cell["steps"]
        if cell["part"] == "width":
            return self._over_rates(method, cell["width"], steps)
        width, blocks = SIZES[cell["size"]]
        if self.start_from in ("", cell["size"]):
            found = self._tuned(method, width, blocks, steps)
        else:
            found = self._tuned(method, *SIZES[self.start_from], steps)
            start = best_place(found)
            found = {start: found[start]}
            if self.later_tries:
                tuning = self.later_tries, self.tuning_seeds[:1], start
                found = self._tuned(method, width, blocks, steps, *tuning)
        place = best_place(found)
        knobs = method.knobs(place)
        rows = [self._trained(method.program, width, blocks, steps, seed, knobs, True)
                for seed in self.seeds]  # fmt: skip
        return {
            "tuned": [[*at, loss] for at, loss in found.items()],
            "place": place,
            "log2_rate": float(np.log2(knobs.rate)),
            "second": method.second,
            "value": getattr(knobs, method.second),
            "momentum": knobs.momentum,
            "rest_rate": knobs.rest_rate,
            **{name: [row[name] for row in rows] for name in rows[0]},
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return summary(rows)

    def table(self, record: Record) -> str:
        return table(record["summary"])

    def plot(self, record: Record) -> Any:
        return picture(record)

    def _tuned(
        self, method: Method, width: int, blocks: int, steps: int, tries: int | None = None,
        seeds: Sequence[int] | None = None, start: Place = START,
    ) -> dict[Place, float]:  # fmt: skip
        """Return the losses of all tried points, by default with `tries` and `tuning_seeds`."""

        def loss(place: Place) -> float:
            knobs = method.knobs(place)
            rows = [self._trained(method.program, width, blocks, steps, seed, knobs, False)
                    for seed in seeds or self.tuning_seeds]  # fmt: skip
            return float(np.mean([row["loss"] for row in rows]))

        return search(loss, tries or self.tries, start)

    def _over_rates(self, method: Method, width: int, steps: int) -> Mapping[str, Any]:
        """Return the losses over rates an octave apart, extended until the best is not at an end.

        The other knobs are tuned at the first size.
        """
        narrow, blocks = SIZES[self.sizes[0]]
        middle, *others = best_place(self._tuned(method, narrow, blocks, steps))
        losses: dict[int, list[float]] = {}
        octaves = [-1, 0, 1]
        while octaves:
            for octave in octaves:
                at: Any = (middle + 2 * octave, *others)
                knobs = method.knobs(at)
                losses[octave] = [
                    self._trained(method.program, width, blocks, steps, seed, knobs, False)["loss"]
                    for seed in self.wide_seeds
                ]
            means = {octave: np.nan_to_num(np.mean(own), nan=1e9) for octave, own in losses.items()}
            best = min(means, key=lambda octave: means[octave])
            octaves = [octave for octave in (best - 1, best + 1) if octave not in losses]
        order = sorted(losses)
        return {
            "log2_rates": [method.centre + middle / 2 + octave for octave in order],
            "loss": [[losses[octave][i] for octave in order] for i in range(len(self.wide_seeds))],
        }

    def _trained(
        self, program: str, width: int, blocks: int, steps: int, seed: int, knobs: Knobs,
        measured: bool,
    ) -> dict[str, float]:  # fmt: skip
        """Return the results of a training, from the file `runs` if present."""
        task = Task(self.text, self.data_dir, self.batch, self.context, self.held_out)
        key = json.dumps([program, width, blocks, steps, seed, knobs._asdict(), measured,
                          task.name, task.batch, task.context, task.held_out])  # fmt: skip
        known = _known(self.runs)
        if key not in known:
            size = Size(width, blocks, len(task.text().characters))
            weights, losses = train(program, size, task, steps, seed, knobs)
            found = {"loss": held_out_loss(weights, task),
                     "train_loss": float(losses[-(steps // 6 or 1) :].mean())}  # fmt: skip
            if measured:
                found |= measure(weights, task)
            known[key] = found
            if self.runs is not None:
                self.runs.parent.mkdir(parents=True, exist_ok=True)
                with self.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, found]) + "\n")
        return known[key]


@functools.lru_cache(maxsize=4)
def _known(path: Path | None) -> dict[str, dict[str, float]]:
    """Return the runs in a file; drop an incomplete line."""
    if path is None or not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    found = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            key, row = json.loads(line)
            found[key] = row
    return found
