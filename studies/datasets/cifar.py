"""CIFAR-10, from the Python version of Krizhevsky's archive, read without executing its pickles.

A pickle is a program that can call any function it names. This reader maps the names required for
arrays of unsigned bytes to its own stand-ins, and rejects all other names. It never calls NumPy's
own functions, which also avoids NumPy's warning about data types written by Python 2.
"""

import io
import os
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from studies.datasets.files import DatasetError, data_home, fetch, find
from studies.datasets.images import Dataset

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_DIGEST = "md5:c58f30108f718f92721af3b95e74349a"
_ARCHIVE = "cifar-10-python.tar.gz"
_FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
_META = "batches.meta"


def load_cifar10(directory: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset:
    """Load CIFAR-10's photographs: 50,000 training and 10,000 test images, 32 by 32 by RGB.

    The archive holds pickles, which are read without executing anything they name.

    Args:
      directory: folder with `cifar-10-python.tar.gz` or the unpacked `cifar-10-batches-py`, or
        the archive itself under any name. Only format and shapes are checked, not the contents.
        The default is `data_home()`, where the archive must be the official file.
      download: whether to download an archive missing from `data_home()` (163 MiB).

    Raises:
      DatasetError: the archive is missing, damaged or cannot be downloaded.
    """
    files = _read_files(_locate(directory, download))
    parts = [_labelled(files[name], name) for name in _TRAIN]
    train_x = np.concatenate([images for images, _ in parts])
    train_y = np.concatenate([labels for _, labels in parts])
    test_x, test_y = _labelled(files[_TEST], _TEST)
    names = files[_META].get("label_names")
    if not isinstance(names, list) or len(names) != 10:
        raise DatasetError(f"CIFAR-10: {_META} does not name ten classes")
    return Dataset(
        train_x, train_y, test_x, test_y, "cifar10", tuple(_text(name) for name in names)
    )


def _locate(directory: str | os.PathLike[str] | None, download: bool) -> Path:
    if directory is None:
        return fetch("CIFAR-10", data_home() / _ARCHIVE, _URL, _DIGEST, download)
    directory = Path(directory)
    if directory.is_file() or directory.name == _FOLDER:
        return directory
    if (directory / _FOLDER).is_dir():
        return directory / _FOLDER
    return find("CIFAR-10", directory, (_ARCHIVE, f"{_FOLDER}/{_META}"))


def _read_files(path: Path) -> dict[str, dict[str, Any]]:
    names = (*_TRAIN, _TEST, _META)
    if path.is_dir():
        contents = {name: find("CIFAR-10", path, (name,)).read_bytes() for name in names}
    else:
        contents = _read_archive(path, names)
    return {name: _read_pickle(data, f"{path}: {name}") for name, data in contents.items()}


def _read_archive(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files' contents, without unpacking to disk."""
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                if folder.endswith(_FOLDER) and name in names and member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None  # regular files have contents
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DatasetError(f"{path} is not a whole tar.gz archive: {error}") from None
    if missing := [name for name in names if name not in contents]:
        raise DatasetError(f"{path} has no {', '.join(missing)} in {_FOLDER}")
    return contents


def _labelled(batch: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = batch.get("data"), batch.get("labels")
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != 3072:
        raise DatasetError(f"CIFAR-10: the data of {name} is not an array of shape (n, 3072)")
    if not isinstance(labels, list) or len(labels) != len(images):
        raise DatasetError(f"CIFAR-10: {name} has no list of {len(images)} labels")
    if not all(isinstance(label, int) and 0 <= label <= 9 for label in labels):
        raise DatasetError(f"CIFAR-10: {name} has labels that are not numbers from 0 to 9")
    # Stored channels-first.
    channels_last = images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return channels_last.astype(np.float32) / np.float32(255), np.asarray(labels, np.int32)


# --- Pickles -----------------------------------------------------------------------------------


def _read_pickle(contents: bytes, what: str) -> dict[str, Any]:
    """Read a pickled dictionary of numbers, strings, lists and arrays of unsigned bytes.

    Args:
      contents: pickle of protocol 0 to 4, from Python 2 or 3.
      what: name of the pickle, for messages.

    Returns:
      The dictionary, with strings as keys.

    Raises:
      DatasetError: it holds anything else, or is not a pickle.
    """
    try:
        value = _Reader(io.BytesIO(contents), encoding="bytes").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise DatasetError(f"{what} is not a pickle of plain data: {error}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{what} holds a {type(value).__name__}, not a dictionary")
    return {_text(key): _unwrap(item) for key, item in value.items()}


def _text(value: str | bytes) -> str:
    """Return a string, written by Python 2 or 3."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Dtype:
    def __init__(self, code: str | bytes, *_: Any):
        if _text(code) not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"arrays must hold unsigned bytes; got {_text(code)}")

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags, which bytes do not have."""


class _Array:
    array: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, contents = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array without a data type")
        flat = np.frombuffer(contents, dtype=np.uint8)
        self.array = flat.reshape(shape, order="F" if by_columns else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(value: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be encoded as latin1; got {encoding}")
    return value.encode("latin-1")


_NAMES = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _NAMES[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it imports {module_name}.{global_name}") from None


def _unwrap(value: Any) -> Any:
    return value.array if isinstance(value, _Array) else value
