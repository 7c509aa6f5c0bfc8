"""Image data sets for classification, standardised and flattened images, and batches."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class Dataset(NamedTuple):
    """Labelled images, split into a training and a test part.

    Attributes:
      train_x: training images with values in [0, 1]; `(n, height, width)`, plus an axis of three
        channels for colour images.
      train_y: class numbers of the training images.
      test_x: test images, in the form of `train_x`.
      test_y: class numbers of the test images.
      name: name of the data set.
      classes: names of the classes, in the order of their numbers.
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
        """Return the layer widths of a network for these images."""
        return (self.train_x.shape[1], *hidden, self.classes)


def standardise(dataset: Dataset) -> FlatImages:
    """Flatten images and standardise them with a single mean and deviation for all pixels.

    A deviation per pixel would magnify rarely inked pixels.
    """
    train, test = (x.reshape(len(x), -1) for x in (dataset.train_x, dataset.test_x))
    mean, deviation = float(train.mean(dtype=np.float64)), float(train.std())
    train, test = ((x - mean) / deviation for x in (train, test))
    return FlatImages(train, dataset.train_y, test, dataset.test_y, len(dataset.classes))


def batches(seed: int, count: int, steps: int, batch_size: int) -> Int32[np.ndarray, "steps batch"]:
    """Draw the examples of every step: random order, all examples once per epoch.

    Args:
      seed: random seed.
      count: number of examples.
      steps: number of batches.
      batch_size: examples per batch.
    """
    rng = np.random.default_rng(seed)
    epochs = -(-steps * batch_size // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    return order[: steps * batch_size].reshape(steps, batch_size).astype(np.int32)
