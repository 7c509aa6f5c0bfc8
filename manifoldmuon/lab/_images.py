"""Images to classify: standardised, flattened, and in batches whose order a seed decides."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from manifoldmuon.lab.datasets import Dataset


class Data(NamedTuple):
    """Flattened images with mean 0 and variance 1 over all pixels of the training part."""

    train_x: Float32[np.ndarray, "train pixels"]
    train_y: Int32[np.ndarray, " train"]
    test_x: Float32[np.ndarray, "test pixels"]
    test_y: Int32[np.ndarray, " test"]
    classes: int

    def widths(self, hidden: tuple[int, ...]) -> tuple[int, ...]:
        """The widths of a network for these images."""
        return (self.train_x.shape[1], *hidden, self.classes)


def standardise(dataset: Dataset) -> Data:
    """One mean and one deviation for all pixels: no pixel is blown up for being rarely inked."""
    train, test = (x.reshape(len(x), -1) for x in (dataset.train_x, dataset.test_x))
    mean, deviation = float(train.mean(dtype=np.float64)), float(train.std())
    train, test = ((x - mean) / deviation for x in (train, test))
    return Data(train, dataset.train_y, test, dataset.test_y, len(dataset.classes))


def batches(seed: int, count: int, steps: int, batch_size: int) -> Int32[np.ndarray, "steps batch"]:
    """Indices of the training images, shuffled anew in every epoch."""
    rng = np.random.default_rng(seed)
    epochs = -(-steps * batch_size // count)
    order = np.concatenate([rng.permutation(count) for _ in range(epochs)])
    return order[: steps * batch_size].reshape(steps, batch_size).astype(np.int32)
