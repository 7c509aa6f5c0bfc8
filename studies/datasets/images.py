"""Images to classify: as they come, and standardised, flattened and in batches."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class Dataset(NamedTuple):
    """Labelled images, split into a training and a test part.

    Attributes:
      train_x: the training images, between 0 and 1; `(n, height, width)`, with a last axis of
        three channels if they are in colour.
      train_y: the number of each training image's class.
      test_x: the test images, as `train_x`.
      test_y: the number of each test image's class.
      name: the data set's name.
      classes: the classes' names, in the order of their numbers.
    """

    train_x: Float32[np.ndarray, "train *image"]
    train_y: Int32[np.ndarray, " train"]
    test_x: Float32[np.ndarray, "test *image"]
    test_y: Int32[np.ndarray, " test"]
    name: str
    classes: tuple[str, ...]


class FlatImages(NamedTuple):
    """Flattened images with mean 0 and variance 1 over all pixels of the training part."""

    train_x: Float32[np.ndarray, "train pixels"]
    train_y: Int32[np.ndarray, " train"]
    test_x: Float32[np.ndarray, "test pixels"]
    test_y: Int32[np.ndarray, " test"]
    classes: int

    def widths(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        """The widths of a network for these images."""
        return (self.train_x.shape[1], *hidden, self.classes)


def standardise(dataset: Dataset) -> FlatImages:
    """Flattened images with one mean and one deviation for all pixels.

    Pixels that are rarely inked are not magnified, as they would be with a deviation each.
    """
    train, test = (x.reshape(len(x), -1) for x in (dataset.train_x, dataset.test_x))
    mean, deviation = float(train.mean(dtype=np.float64)), float(train.std())
    train, test = ((x - mean) / deviation for x in (train, test))
    return FlatImages(train, dataset.train_y, test, dataset.test_y, len(dataset.classes))


def batches(seed: int, count: int, steps: int, batch_size: int) -> Int32[np.ndarray, "steps batch"]:
    """The examples of every step: each once before any comes again, in random order.

    Args:
      seed: of the order.
      count: how many examples there are.
      steps: how many batches.
      batch_size: examples in each.
    """
    rng = np.random.default_rng(seed)
    epochs = -(-steps * batch_size // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    return order[: steps * batch_size].reshape(steps, batch_size).astype(np.int32)
