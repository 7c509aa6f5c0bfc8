"""The handwritten digits that ship inside scikit-learn: a data set without a download."""

import numpy as np
from jaxtyping import Int

from manifoldmuon.lab.datasets._dataset import Dataset, DatasetError


def load_digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """The 1,797 handwritten digits of 8 by 8 pixels that ship inside scikit-learn.

    Every class is split in the same proportion. The split and the order depend on the arguments
    alone.

    Args:
      seed: which split.
      test_fraction: the share of each class that goes to the test part, between 0 and 1.

    Raises:
      DatasetError: if scikit-learn is not installed.
      ValueError: if `test_fraction` leaves one of the parts without images of some class.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise DatasetError(
            "the digits ship inside scikit-learn: pip install 'manifoldmuon[examples]'"
        ) from None
    images, labels = load(return_X_y=True)
    pixels = images.reshape(-1, 8, 8).astype(np.float32) / np.float32(16)
    labels = labels.astype(np.int32)
    train, test = stratified_split(labels, seed, test_fraction)
    return Dataset(
        pixels[train], labels[train], pixels[test], labels[test], "digits", tuple("0123456789")
    )


def stratified_split(
    labels: Int[np.ndarray, " n"], seed: int, test_fraction: float
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " test"]]:
    """Shuffled indices of a training and a test part, with every class in the same proportion.

    Raises:
      ValueError: if a class would be missing from one of the parts.
    """
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(test_fraction * len(members))
        if not 0 < count < len(members):
            raise ValueError(
                f"test_fraction={test_fraction} puts {count} of the {len(members)} images of "
                f"class {label} into the test part; both parts need some"
            )
        test.append(members[:count])
        train.append(members[count:])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))
