"""Strict readers for JSON and safetensors arrays, which never execute code."""

from __future__ import annotations

import dataclasses
import decimal
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manifoldmuon_verify import _limits
from manifoldmuon_verify._refusal import Refused, short

FLOATS = ("F64", "F32", "F16", "BF16")
_CHUNK = 2**18

# Supported dtypes of the format, and the NumPy dtypes that read their bytes (BF16 as integers).
_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An array as stored in a file.

    Attributes:
      dtype: the format's name, such as `F32`.
      shape: its shape.
      digest: the SHA-256 of its bytes, in hexadecimal digits.
      raw: its numbers as stored; BF16 as 16-bit integers.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    raw: np.ndarray

    def values(self, index: Any = ...) -> np.ndarray:
        """Return a part in float64, or in int64 for integers, without rounding."""
        raw = self.raw[index]
        if self.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.int64 if raw.dtype.kind in "iu" else np.float64)

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield all values in chunks."""
        flat = dataclasses.replace(self, raw=self.raw.reshape(-1))
        for start in range(0, self.raw.size, _CHUNK):
            yield flat.values(slice(start, start + _CHUNK))


def read_bytes(path: Path, where: str, most: int = _limits.MOST_BYTES) -> bytes:
    """Return all bytes of a regular file, read only once: the hashed bytes are the used bytes."""
    try:
        # Check before opening, because opening a device may have side effects.
        _check_file(os.stat(path), path, where, most)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
            # Check again: the file may have been replaced.
            size = _check_file(os.fstat(file.fileno()), path, where, most)
            data = file.read(size + 1)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise Refused(where, f"{path} cannot be read ({what})") from error
    if len(data) != size:
        raise Refused(where, f"{path} changes while it is read")
    return data


def _check_file(found: os.stat_result, path: Path, where: str, most: int) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise Refused(where, f"{path} is not a regular file")
    _limits.check_limit(where, f"bytes in {path}", found.st_size, most)
    return found.st_size


def digest(data: bytes | memoryview) -> str:
    """Return the SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def parse_json(data: bytes | memoryview, where: str) -> Any:
    """Parse JSON; refuse duplicate keys, non-finite numbers and decimals float64 would change."""
    try:
        return json.loads(
            bytes(data).decode("utf-8"),
            object_pairs_hook=lambda pairs: _unique(pairs, where),
            parse_constant=lambda text: _refuse_number(text, where),
            parse_float=lambda text: _number(text, where),
        )
    except (ValueError, RecursionError) as error:
        raise Refused(where, f"not JSON ({short(str(error))})") from error


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        # `add` returns None.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise Refused(where, f"the key {short(twice)} appears twice")
    return found


def _number(text: str, where: str) -> float:
    """Return a float64 if the text equals its shortest decimal, so no two decimals share one."""
    value = float(text)
    if text != repr(value):
        if not math.isfinite(value):
            _refuse_number(text, where)
        with decimal.localcontext() as context:
            # An exponent out of range gives NaN.
            context.traps[decimal.InvalidOperation] = False
            if len(text) > 400 or decimal.Decimal(text) != decimal.Decimal(repr(value)):
                raise Refused(where, f"{short(text)} is not a float64; the nearest is {value!r}")
    return value


def _refuse_number(text: str, where: str) -> float:
    raise Refused(where, f"{short(text)} is not a finite number")


def parse_arrays(data: bytes, where: str) -> dict[str, Stored]:
    """Return the arrays of a file in the safetensors format, by name.

    The format: the length of the header in 8 bytes (little-endian), the header, a JSON object with
    dtype, shape and offsets of each array, then the bytes of the arrays, without gaps or overlaps.
    Empty arrays and non-finite numbers are refused.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise Refused(where, f"truncated: header of {size} bytes in a file of {len(data)}")
    _limits.check_limit(where, "bytes in the header", size, _limits.MOST_JSON_BYTES)
    header = parse_json(memoryview(data)[8 : 8 + size], f"{where}, header")
    body = memoryview(data)[8 + size :]
    if not isinstance(header, dict):
        raise Refused(where, "the header must be an object")
    notes = header.pop("__metadata__", {})
    if not (isinstance(notes, dict) and all(isinstance(note, str) for note in notes.values())):
        raise Refused(where, "__metadata__ of the header must be an object of strings")
    _limits.check_limit(where, "arrays", len(header), _limits.MOST_ARRAYS)
    places = {name: _place(entry, f"{where}, {short(name)}") for name, entry in header.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != end:
            what = "overlaps another array" if start < end else "leaves a gap before it"
            raise Refused(f"{where}, {short(name)}", what)
        end = stop
    if end != len(body):
        raise Refused(where, f"the file has {len(body)} bytes of arrays; the header declares {end}")
    return {
        name: _stored(body[start:stop], dtype, shape, f"{where}, {short(name)}")
        for name, (dtype, shape, start, stop) in places.items()
    }


def _place(entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Refused(where, f"must have dtype, shape and data_offsets; got {short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Refused(where, f"dtype must be in {', '.join(_DTYPES)}; got {short(dtype)}")
    if not (are_counts(shape) and are_counts(offsets) and len(offsets) == 2):
        got = f"{short(shape)}, {short(offsets)}"
        raise Refused(where, f"shape and data_offsets must be sizes; got {got}")
    _limits.check_limit(where, "axes", len(shape), _limits.MOST_AXES)
    start, stop = offsets
    wanted = math.prod(shape) * _DTYPES[dtype].itemsize
    if stop - start != wanted:
        raise Refused(where, f"{dtype}{shape} takes {wanted} bytes; offsets span {stop - start}")
    if not wanted:
        raise Refused(where, "is empty: an array must have entries")
    return dtype, tuple(shape), start, stop


def are_counts(value: Any) -> bool:
    """Return whether this is a list of integers from 0 to 2**48 - 1 (no booleans)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _stored(data: memoryview, dtype: str, shape: tuple[int, ...], where: str) -> Stored:
    raw = np.frombuffer(data, _DTYPES[dtype]).reshape(shape)
    stored = Stored(dtype, shape, digest(data), raw)
    if dtype in FLOATS and not all(np.all(np.isfinite(chunk)) for chunk in stored.chunks()):
        raise Refused(where, "not all numbers are finite")
    return stored
