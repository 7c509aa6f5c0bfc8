"""Tasks: image classification and character prediction."""

import abc
import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Int32

from studies import datasets

IMAGES = ("digits", "mnist", "cifar10")
HELD_OUT_WINDOWS = 128


class Parts(NamedTuple):
    """A tree of training arrays, and held-out inputs and labels."""

    train: Any
    held_out: tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """Data and its batches; the loss is the cross-entropy of scores.

    Attributes:
      batch: examples per step.
      folder: the folder of the data; None for shipped or downloaded data.
    """

    batch: int = 64
    folder: Path | None = None

    @abc.abstractmethod
    def parts(self) -> Parts:
        """Return the data, loaded once.

        Raises:
          DatasetError: the data is missing.
        """

    @property
    @abc.abstractmethod
    def places(self) -> int:
        """The number of examples to draw from."""

    @abc.abstractmethod
    def batch_of(self, train: Any, chosen: Int[Array, " b"]) -> tuple[Array, Int[Array, "b ..."]]:
        """Return inputs and labels of the chosen examples."""

    def order(self, steps: int, seed: int) -> Int32[np.ndarray, "steps b"]:
        """Return the examples of every step, from successive random permutations."""
        return datasets.batches(seed, self.places, steps, self.batch)

    @property
    @abc.abstractmethod
    def inputs(self) -> int:
        """The number of entries of an input, or of different tokens."""

    @property
    @abc.abstractmethod
    def classes(self) -> int:
        """The number of labels."""


@dataclasses.dataclass(frozen=True)
class Pictures(Task):
    """Standardised, flattened images.

    Attributes:
      name: a member of `IMAGES`.
    """

    name: str = "digits"

    def parts(self) -> Parts:
        return _pictures(self.name, self.folder)

    @property
    def places(self) -> int:
        return len(self.parts().train[1])

    def batch_of(
        self, train: Any, chosen: Int[Array, " b"]
    ) -> tuple[Float[Array, "b p"], Int[Array, " b"]]:
        images, labels = train
        return images[chosen], labels[chosen]

    @property
    def inputs(self) -> int:
        return self.parts().train[0].shape[1]

    @property
    def classes(self) -> int:
        return int(self.parts().train[1].max()) + 1


@dataclasses.dataclass(frozen=True)
class Characters(Task):
    """Windows of a text; every character is predicted from the characters before it.

    Attributes:
      name: a member of `datasets.TEXTS`.
      context: characters per window.
    """

    name: str = "pydoc"
    context: int = 32

    def parts(self) -> Parts:
        text = datasets.load_text(self.name, self.folder)
        rest = text.validation
        starts = np.linspace(0, len(rest) - self.context - 1, HELD_OUT_WINDOWS).astype(np.int32)
        return Parts(text.train, datasets.windows(rest, starts, self.context))

    @property
    def places(self) -> int:
        return len(self.parts().train) - self.context

    def batch_of(
        self, train: Any, chosen: Int[Array, " b"]
    ) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
        return datasets.windows(train, chosen, self.context)

    @property
    def inputs(self) -> int:
        return len(datasets.load_text(self.name, self.folder).characters)

    @property
    def classes(self) -> int:
        return self.inputs


@functools.lru_cache(maxsize=2)
def _pictures(name: str, folder: Path | None) -> Parts:
    data = datasets.standardise(_dataset(name, folder))
    return Parts((data.train_x, data.train_y), (data.test_x, data.test_y))


def _dataset(name: str, folder: Path | None) -> datasets.Dataset:
    if name == "digits":
        return datasets.load_digits()
    return (datasets.load_mnist if name == "mnist" else datasets.load_cifar10)(folder)
