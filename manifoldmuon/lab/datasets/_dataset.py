"""What every loader of images returns, and the one error that loaders raise."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class DatasetError(RuntimeError):
    """A data set that is missing, damaged or out of reach; one line that says what to do."""


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
