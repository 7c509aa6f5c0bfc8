"""Handwritten digits: scikit-learn's small data set, and MNIST.

MNIST is read in the idx format of LeCun, Cortes and Burges.
"""

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8

from studies.datasets.files import DatasetError, data_home, fetch, find
from studies.datasets.images import Dataset

_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"

# Digests of the uncompressed contents: the gzip files differ between mirrors.
_FILES = {
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}


def load_digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """Load the 1,797 handwritten digits of 8 by 8 pixels that ship with scikit-learn.

    Every class is split in the same proportion. The split and the order depend only on the
    arguments.

    Args:
      seed: seed of the split.
      test_fraction: share of each class in the test part, between 0 and 1.

    Raises:
      DatasetError: scikit-learn is not installed.
      ValueError: `test_fraction` leaves one of the parts without images of some class.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise DatasetError(
            "the digits need scikit-learn: pip install '.[studies]' from the root of the source"
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
    """Return shuffled indices of a training and a test part, with equal class proportions.

    Raises:
      ValueError: a part would lack some class.
    """
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        count = round(test_fraction * len(members))
        if not 0 < count < len(members):
            raise ValueError(
                f"test_fraction={test_fraction} puts {count} of the {len(members)} images of "
                f"class {label} into the test part; each part needs at least 1"
            )
        test.append(members[:count])
        train.append(members[count:])
    return rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))


def load_mnist(directory: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset:
    """Load MNIST's handwritten digits: 60,000 training and 10,000 test images, 28 by 28.

    Args:
      directory: folder with the four files (`train-images-idx3-ubyte.gz` and so on, or the same
        without `.gz`). Only format and shapes are checked, so any data in this format is
        accepted. The default is `data_home() / "mnist"`, where the contents must be official.
      download: whether to download files missing from `data_home()`.

    Raises:
      DatasetError: a file is missing, damaged or cannot be downloaded.
    """
    arrays = {name: read_idx(path) for name, path in _paths(directory, download).items()}
    train_x, train_y = _labelled(arrays, "train")
    test_x, test_y = _labelled(arrays, "t10k")
    return Dataset(train_x, train_y, test_x, test_y, "mnist", tuple("0123456789"))


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Read an idx file of unsigned bytes, compressed with gzip if its name ends in `.gz`.

    Raises:
      DatasetError: the file has another format, or is truncated.
    """
    contents = _contents(path)
    if len(contents) < 4 or contents[:3] != b"\x00\x00\x08":
        raise DatasetError(f"{path} is not an idx file of unsigned bytes: wrong magic number")
    start = 4 + 4 * contents[3]
    if len(contents) < start:
        raise DatasetError(f"{path} is cut short: its header is incomplete")
    shape = tuple(int(size) for size in np.frombuffer(contents[4:start], dtype=">u4"))
    promised = start + int(np.prod(shape, dtype=object))
    if len(contents) != promised:
        raise DatasetError(
            f"{path} is damaged: its header promises {promised} bytes for the shape {shape}, "
            f"and it has {len(contents)}"
        )
    return np.frombuffer(contents, dtype=np.uint8, offset=start).reshape(shape)


def _paths(directory: str | os.PathLike[str] | None, download: bool) -> dict[str, Path]:
    if directory is not None:
        return {name: find("MNIST", Path(directory), (f"{name}.gz", name)) for name in _FILES}
    home = data_home() / "mnist"
    return {
        name: fetch("MNIST", home / f"{name}.gz", f"{_URL}{name}.gz", digest, download, _gunzip)
        for name, digest in _FILES.items()
    }


def _contents(path: Path) -> bytes:
    return _gunzip(path) if path.suffix == ".gz" else path.read_bytes()


def _gunzip(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} is not a whole gzip file: {error}") from None


def _labelled(arrays: dict[str, np.ndarray], part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays[f"{part}-images-idx3-ubyte"], arrays[f"{part}-labels-idx1-ubyte"]
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DatasetError(f"MNIST: {part} images have the shape {images.shape}, not (n, 28, 28)")
    if labels.shape != images.shape[:1]:
        raise DatasetError(
            f"MNIST: {part} labels have the shape {labels.shape}, for {len(images)} images"
        )
    if labels.max(initial=0) > 9:
        raise DatasetError(f"MNIST: {part} labels go up to {labels.max()}, not 9")
    return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)
