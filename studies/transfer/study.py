"""Learning-rate transfer: does the best learning rate move with the size of a network?"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from studies.datasets import TEXTS
from studies.networks.architectures import Architecture, Perceptron, Residual, Transformer
from studies.networks.descent import Descent, late_loss
from studies.networks.methods import METHODS
from studies.networks.tasks import IMAGES, Characters, Pictures, Task
from studies.study import Cell, Record, Row, Study, option
from studies.transfer.findings import MASS, RATES, findings, table
from studies.transfer.picture import picture

MASS_METHOD = "modular"


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of all sweeps of a study.

    Attributes:
      images: the data set of the networks without attention.
      text: the text of the GPT.
      folder: the folder of the files.
      images_per_step: the batch size for images.
      windows_per_step: the batch size for windows of text.
      context: characters per window.
    """

    images: str
    text: str
    folder: Path | None
    images_per_step: int
    windows_per_step: int
    context: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """An architecture with a varying size.

    Attributes:
      base: the architecture with its fixed sizes.
      axis: the varying size: "width", "depth" or "context".
      sizes: the default sizes.
    """

    base: Architecture
    axis: str
    sizes: tuple[int, ...]

    @property
    def reads(self) -> bool:
        """True for networks trained on text."""
        return isinstance(self.base, Transformer)

    def architecture(self, size: int) -> Architecture:
        """Return the architecture of this size."""
        if self.axis == "context":
            return self.base
        return dataclasses.replace(self.base, **{self.axis: size})

    def task(self, size: int, data: Data) -> Task:
        """Return the task for this size."""
        if not self.reads:
            return Pictures(data.images_per_step, data.folder, data.images)
        context = size if self.axis == "context" else data.context
        return Characters(data.windows_per_step, data.folder, data.text, context)

    def check(self, size: int) -> None:
        """Raise `ValueError` for an invalid size."""
        least = {"width": 1, "depth": 2 if isinstance(self.base, Perceptron) else 1, "context": 2}
        if size < least[self.axis]:
            raise ValueError(f"must be at least {least[self.axis]}; got {size}")
        if not isinstance(self.base, Transformer) or self.axis != "width":
            return
        if size % (2 * self.base.heads):  # rotary positions turn pairs of entries
            raise ValueError(
                f"must be a multiple of {2 * self.base.heads}, twice the heads; got {size}"
            )


SWEEPS = {
    "mlp-width": Sweep(Perceptron(), "width", (32, 64, 128, 256)),
    "mlp-depth": Sweep(Perceptron(), "depth", (2, 4, 8)),
    "resmlp-width": Sweep(Residual(), "width", (32, 64, 128)),
    "resmlp-depth": Sweep(Residual(), "depth", (2, 4, 8)),
    "gpt-width": Sweep(Transformer(), "width", (16, 32, 64)),
    "gpt-depth": Sweep(Transformer(), "depth", (1, 2, 4)),
    "gpt-context": Sweep(Transformer(), "context", (16, 32, 64)),
}


@dataclasses.dataclass(frozen=True)
class LearningRateTransfer(Study):
    """Does the best learning rate stay when a network grows?

    Trains networks of several sizes with each method over a grid of learning rates, an octave
    apart. A parabola around the lowest loss gives each seed's best rate; a line through all seeds
    and sizes gives the drift in octaves per doubling. In the same runs, the coordinate check
    compares the feature changes of each layer in the first steps. Further runs vary the mass of
    the residual blocks, their share of the learning.
    """

    name: ClassVar[str] = "transfer"

    # fmt: off
    sweeps: tuple[str, ...] = option(
        ("mlp-width", "resmlp-depth", "gpt-width"), "networks, and the size that grows",
        choices=tuple(SWEEPS))
    methods: tuple[str, ...] = option(tuple(METHODS), "methods of training", choices=tuple(METHODS))
    sizes: tuple[int, ...] = option((), "sizes of every sweep; left out: each sweep's own")
    mass_sweeps: tuple[str, ...] = option(
        ("resmlp-depth",), "sweeps in which block masses are compared, at both ends",
        choices=tuple(name for name, sweep in SWEEPS.items() if hasattr(sweep.base, "mass")))
    masses: tuple[float, ...] = option((0.5, 1.0, 3.0, 10.0), "masses of all blocks")
    widen: int = option(0, "octaves to add at both ends of each grid")
    steps: int = option(100, "steps of each training; the rate falls linearly to zero")
    early: int = option(5, "step at which features are compared")
    multiplier: float = option(4.0, "factor of image scores in the modular parametrisation")
    text_multiplier: float = option(1.0, "factor of text scores in the modular parametrisation")
    images: str = option("digits", "data set for the networks without attention", choices=IMAGES)
    text: str = option("pydoc", "text for the GPT", choices=TEXTS)
    data_dir: Path | None = option(None, "folder with the data", recorded=False)
    images_per_step: int = option(32, "images per step")
    windows_per_step: int = option(8, "windows of text per step")
    context: int = option(32, "characters per window")
    seeds: tuple[int, ...] = option((0, 1, 2, 3), "seeds of weights and batches")
    # fmt: on

    def __post_init__(self):
        least = min(self.steps, self.early, self.images_per_step, self.windows_per_step)
        if least < 1 or self.early > self.steps:
            raise ValueError(
                "steps, early and the batches must be at least 1, and early at most steps; got "
                f"steps={self.steps}, early={self.early}, images_per_step={self.images_per_step}, "
                f"windows_per_step={self.windows_per_step}"
            )
        if not (self.sweeps and self.methods and self.seeds):
            raise ValueError(f"sweeps, methods and seeds must not be empty; got {self}")
        if len(set(self.seeds)) < len(self.seeds) or self.widen < 0:
            raise ValueError(
                f"seeds must differ and widen be at least 0; got {self.seeds}, {self.widen}"
            )
        if min(self.multiplier, self.text_multiplier) <= 0:
            raise ValueError(
                f"multipliers must be positive; got {self.multiplier}, {self.text_multiplier}"
            )
        if not self.masses or min(self.masses) <= 0:
            raise ValueError(f"masses must be positive; got {self.masses}")
        for name in set(self.sweeps) & set(SWEEPS):
            _check_sizes(name, self._sizes(name))

    def cells(self) -> Sequence[Cell]:
        cells: list[Cell] = [
            {"part": RATES, "sweep": sweep, "method": method, "size": size, "seed": seed}
            for sweep in self.sweeps
            for size in self._sizes(sweep)
            for method in self.methods
            for seed in self.seeds
        ]
        return cells + [
            {"part": MASS, "sweep": sweep, "method": MASS_METHOD, "size": size, "mass": mass,
             "seed": seed}
            for sweep in self._mass_sweeps()
            for size in (self._sizes(sweep)[0], self._sizes(sweep)[-1])
            for mass in self.masses
            for seed in self.seeds
        ]  # fmt: skip

    def run(self, cell: Cell) -> Mapping[str, Any]:
        sweep, method = SWEEPS[cell["sweep"]], METHODS[cell["method"]]
        task = sweep.task(cell["size"], self._data())
        architecture = sweep.architecture(cell["size"])
        if cell["part"] == MASS:
            assert isinstance(architecture, Residual | Transformer)
            architecture = dataclasses.replace(architecture, mass=cell["mass"])
        network = method.network(architecture, task.inputs, task.classes)
        exponents = method.grid(self.widen)
        scale = self.text_multiplier if sweep.reads else self.multiplier
        multiplier = 1.0 if method.standard else scale
        descent = Descent(method, network, task, self.steps, self.early, multiplier)
        trained = descent.train(2.0 ** np.array(exponents), cell["seed"])
        found = {
            "log2_rates": exponents,
            "first_loss": trained.loss[0, 0],
            "losses": late_loss(np.asarray(trained.loss)),
        }
        if cell["part"] == RATES and sweep.axis == "width":
            found["changes"] = descent.changes(trained, cell["seed"])
        return found

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return findings(rows)

    def table(self, record: Record) -> str:
        return table(record["summary"], self.masses)

    def plot(self, record: Record) -> Any:
        return picture(record)

    def _mass_sweeps(self) -> list[str]:
        return [sweep for sweep in self.mass_sweeps if sweep in self.sweeps]

    def _sizes(self, sweep: str) -> tuple[int, ...]:
        return self.sizes or SWEEPS[sweep].sizes

    def _data(self) -> Data:
        return Data(self.images, self.text, self.data_dir, self.images_per_step,
                    self.windows_per_step, self.context)  # fmt: skip


def _check_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes must be two or more, ascending; got {sizes}")
    for size in sizes:
        try:
            SWEEPS[name].check(size)
        except ValueError as error:
            raise ValueError(f"the sizes of {name} {error}") from error
