"""Which sizes of which architecture are compared, and on which data."""

import dataclasses
from pathlib import Path

from manifoldmuon.lab.studies._architectures import (
    Architecture,
    Perceptron,
    Residual,
    Transformer,
)
from manifoldmuon.lab.studies._tasks import Characters, Pictures, Task


@dataclasses.dataclass(frozen=True)
class Data:
    """What all sweeps of a study are trained on.

    Attributes:
      images: the data set of the networks without attention.
      text: that of the GPT.
      folder: where their files lie.
      images_per_step: the batch of the first.
      windows_per_step: the batch of the second.
      context: characters of a window.
    """

    images: str
    text: str
    folder: Path | None
    images_per_step: int
    windows_per_step: int
    context: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One size of an architecture that varies.

    Attributes:
      base: the architecture; its other sizes stay.
      axis: which size: "width", "depth" or "context".
      sizes: by default.
    """

    base: Architecture
    axis: str
    sizes: tuple[int, ...]

    @property
    def reads(self) -> bool:
        """Whether it is trained on text."""
        return isinstance(self.base, Transformer)

    def architecture(self, size: int) -> Architecture:
        """The architecture of this size."""
        if self.axis == "context":
            return self.base
        return dataclasses.replace(self.base, **{self.axis: size})

    def task(self, size: int, data: Data) -> Task:
        """What an architecture of this size is trained on."""
        if not self.reads:
            return Pictures(data.images_per_step, data.folder, data.images)
        context = size if self.axis == "context" else data.context
        return Characters(data.windows_per_step, data.folder, data.text, context)

    def check(self, size: int) -> None:
        """Raises `ValueError` for a size that no network of this kind has."""
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
