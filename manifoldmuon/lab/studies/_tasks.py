"""What networks are trained on: images to classify, and characters to predict."""

import abc
import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from manifoldmuon.lab._images import batches, standardise
from manifoldmuon.lab.datasets import (
    Dataset,
    load_cifar10,
    load_digits,
    load_mnist,
    load_pydoc_topics,
    load_shakespeare,
)

IMAGES = ("digits", "mnist", "cifar10")
TEXTS = ("pydoc", "shakespeare")
HELD_OUT_WINDOWS = 128


class Parts(NamedTuple):
    """A tree of arrays to train on, and inputs and labels to judge by."""

    train: Any
    held_out: tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """Data and how they are drawn; the loss is the cross-entropy of scores.

    Attributes:
      batch: examples in each step.
      folder: where the files of the data lie; None for those that ship or are downloaded.
    """

    batch: int = 64
    folder: Path | None = None

    @abc.abstractmethod
    def parts(self) -> Parts:
        """The data, loaded once.

        Raises:
          DatasetError: they are missing.
        """

    @property
    @abc.abstractmethod
    def places(self) -> int:
        """How many examples there are to draw from."""

    @abc.abstractmethod
    def batch_of(self, train: Any, chosen: Int[Array, " b"]) -> tuple[Array, Int[Array, "b ..."]]:
        """Inputs and labels of the chosen examples."""

    def order(self, steps: int, seed: int) -> Int32[np.ndarray, "steps b"]:
        """The examples of every step: in random order, each once before any comes again."""
        return batches(seed, self.places, steps, self.batch)

    @property
    @abc.abstractmethod
    def inputs(self) -> int:
        """Entries of an input, or how many different tokens there are."""

    @property
    @abc.abstractmethod
    def classes(self) -> int:
        """How many labels there are."""


@dataclasses.dataclass(frozen=True)
class Pictures(Task):
    """Standardised images, flattened.

    Attributes:
      name: one of `IMAGES`.
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
    """Windows of a text; every character is to be predicted from those before it.

    Attributes:
      name: one of `TEXTS`.
      context: characters of a window.
    """

    name: str = "pydoc"
    context: int = 32

    def parts(self) -> Parts:
        tokens, rest = _characters(self.name, self.folder)
        starts = np.linspace(0, len(rest) - self.context - 1, HELD_OUT_WINDOWS).astype(np.int32)
        return Parts(tokens, _windows(rest, starts, self.context))

    @property
    def places(self) -> int:
        return len(self.parts().train) - self.context

    def batch_of(
        self, train: Any, chosen: Int[Array, " b"]
    ) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
        return _windows(train, chosen, self.context)

    @property
    def inputs(self) -> int:
        return int(max(part.max() for part in _characters(self.name, self.folder))) + 1

    @property
    def classes(self) -> int:
        return self.inputs


def _windows(tokens: Any, starts: Any, context: int) -> tuple[Any, Any]:
    """The characters of each window, and the one that follows each of them."""
    window = tokens[starts[:, None] + jnp.arange(context + 1)]
    return window[:, :-1], window[:, 1:]


@functools.lru_cache(maxsize=2)
def _pictures(name: str, folder: Path | None) -> Parts:
    data = standardise(_dataset(name, folder))
    return Parts((data.train_x, data.train_y), (data.test_x, data.test_y))


def _dataset(name: str, folder: Path | None) -> Dataset:
    if name == "digits":
        return load_digits()
    return (load_mnist if name == "mnist" else load_cifar10)(folder)


@functools.lru_cache(maxsize=2)
def _characters(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on, the first nine tenths, and the rest."""
    text = load_pydoc_topics() if name == "pydoc" else load_shakespeare(folder)
    _, tokens = np.unique(np.array(list(text)), return_inverse=True)
    tokens = tokens.astype(np.int32)
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]
