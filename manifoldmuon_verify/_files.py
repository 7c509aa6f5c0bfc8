"""Strict readers: of JSON, and of arrays in the safetensors format. They read nothing but bytes."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manifoldmuon_verify._refusal import Refused, short

_LARGEST_JSON = 2**28
_LARGEST_HEADER = 2**24

# Of each dtype of the format that is taken: how its bytes are read, and what widens them exactly.
_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


class Stored(NamedTuple):
    """An array as it lies in a file.

    Attributes:
      dtype: in the words of the format, such as `F32`.
      shape: its sizes.
      digest: the SHA-256 of its bytes, in hexadecimal digits.
      values: float64, converted without rounding; whole numbers as int64.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    values: np.ndarray


def read_bytes(path: Path, where: str) -> bytes:
    """All bytes of a file, read once: what is digested is what is used."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(where, f"{path} cannot be read ({error.strerror})") from error


def digest(data: bytes | memoryview) -> str:
    """The SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def parse_json(data: bytes, where: str, largest: int = _LARGEST_JSON) -> Any:
    """What JSON says, if each key is there once and each number finite."""
    if len(data) > largest:
        raise Refused(where, f"{len(data)} bytes of JSON; at most {largest} are read")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=lambda pairs: _unique(pairs, where),
            parse_constant=lambda text: _refuse_number(text, where),
            parse_float=lambda text: _finite(text, where),
        )
    except (ValueError, RecursionError) as error:
        raise Refused(where, f"not JSON ({short(str(error))})") from error


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Refused(where, f"the key {short(twice)} stands twice")
    return found


def _finite(text: str, where: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text, where)


def _refuse_number(text: str, where: str) -> float:
    raise Refused(where, f"{short(text)} is not a finite number")


def parse_arrays(data: bytes, where: str) -> dict[str, Stored]:
    """The arrays of a file in the safetensors format, by name.

    The format: the length of the header in 8 bytes (little-endian), the header, a JSON object that
    gives dtype, shape and place of each array, then the bytes of the arrays one after the other.
    Nothing is skipped and nothing overlaps.

    Raises:
      Refused: anything else, or numbers that are not finite.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_LARGEST_HEADER, len(data) - 8):
        raise Refused(where, f"cut off: a header of {size} bytes in a file of {len(data)}")
    header = parse_json(data[8 : 8 + size], f"{where}, header")
    body = memoryview(data)[8 + size :]
    if not isinstance(header, dict):
        raise Refused(where, "the header is not an object")
    notes = header.pop("__metadata__", {})
    if not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise Refused(where, "the header's __metadata__ is not an object of strings")
    places = {name: _place(entry, f"{where}, {short(name)}") for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != end:
            what = "overlaps another array" if start < end else "leaves a hole before it"
            raise Refused(f"{where}, {short(name)}", what)
        end = stop
    if end != len(body):
        raise Refused(where, f"{len(body)} bytes of arrays, and the header tells of {end}")
    return {
        name: _stored(body[start:stop], dtype, shape, f"{where}, {short(name)}")
        for name, (dtype, shape, start, stop) in places.items()
    }


def _place(entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Refused(where, "its header must be dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Refused(where, f"the dtype {short(dtype)} is none of {', '.join(_DTYPES)}")
    if not (are_counts(shape) and are_counts(offsets) and len(offsets) == 2):
        raise Refused(where, f"shape {short(shape)} or offsets {short(offsets)} are not sizes")
    start, stop = offsets
    wanted = math.prod(shape) * _DTYPES[dtype].itemsize
    if stop - start != wanted:
        raise Refused(where, f"{stop - start} bytes for {dtype}{shape}, which takes {wanted}")
    return dtype, tuple(shape), start, stop


def are_counts(value: Any) -> bool:
    """Whether this is a list of whole numbers from 0 on (no booleans)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _stored(data: memoryview, dtype: str, shape: tuple[int, ...], where: str) -> Stored:
    raw = np.frombuffer(data, _DTYPES[dtype])
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    values = raw.astype(np.int64 if raw.dtype.kind in "iu" else np.float64).reshape(shape)
    if not np.all(np.isfinite(values)):
        raise Refused(where, "not all numbers are finite")
    return Stored(dtype, shape, digest(data), values)
