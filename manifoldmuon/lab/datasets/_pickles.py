"""Unpickling arrays of bytes without running anything that a pickle asks for.

A pickle is a program that may call any function it names. This reader answers every name with a
stand-in of its own and refuses all names but those that an array of unsigned bytes needs. NumPy
itself is not called, which also spares its warning about how Python 2 wrote data types.
"""

import io
import pickle
from typing import Any

import numpy as np

from manifoldmuon.lab.datasets._dataset import DatasetError


def read_pickle(contents: bytes, what: str) -> dict[str, Any]:
    """Reads a pickled dictionary of numbers, strings, lists and arrays of unsigned bytes.

    Args:
      contents: a pickle of protocol 0 to 4, from Python 2 or 3.
      what: its name, for messages.

    Returns:
      The dictionary, with its keys as strings.

    Raises:
      DatasetError: if it holds anything else, or is not a pickle.
    """
    try:
        value = _Reader(io.BytesIO(contents), encoding="bytes").load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise DatasetError(f"{what} is not a pickle of plain data: {error}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{what} holds a {type(value).__name__}, not a dictionary")
    return {text(key): _unwrap(item) for key, item in value.items()}


def text(value: str | bytes) -> str:
    """A string, whichever Python wrote it."""
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Dtype:
    def __init__(self, code: str | bytes, *_: Any):
        if text(code) not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"an array of {text(code)}, not of unsigned bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags, which bytes do not have."""


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
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
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
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None


def _unwrap(value: Any) -> Any:
    return value.array if isinstance(value, _Array) else value
