"""Records: results and environment of a measurement, as strict JSON, written atomically."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PACKAGES = ("manifoldmuon", "jax", "jaxlib", "optax", "numpy")


class WriteError(OSError):
    """A full or read-only disk; the message is a line with advice."""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; move it to `path` at the end, so that `path` is written atomically.

    The temporary file is in the folder of `path`, because moves are atomic only within a file
    system. Missing folders are created.

    Raises:
      WriteError: the file cannot be written; an existing file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(folder: Path) -> None:
    """Check, before any work, that the folder can be created and written to.

    Raises:
      WriteError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(256))
    except OSError as error:
        raise not_written(folder, error) from error


def not_written(path: Path, error: OSError) -> WriteError:
    return WriteError(
        f"cannot write {path} ({error.strerror or error}); what was saved before is unchanged: "
        "make room or choose another folder"
    )


def write_record(
    path: str | os.PathLike[str], record: Mapping[str, Any], overwrite: bool = False
) -> Path:
    """Write `record` to `path` as JSON, atomically.

    NumPy and JAX scalars become numbers, arrays become nested lists, tuples become lists, named
    tuples become objects. NaN and infinity, which JSON lacks, become `null`. Missing folders are
    created.

    Args:
      path: the file to write.
      record: the record; all keys, at every depth, are strings.
      overwrite: whether to replace an existing file.

    Returns:
      The path.

    Raises:
      FileExistsError: `path` exists and `overwrite` is false.
      TypeError: JSON cannot hold a key or a value; the message locates it in the record.
      WriteError: the disk is full or read-only.
    """
    path = Path(path)
    text = json.dumps(_plain(record, "record"), indent=2, allow_nan=False, ensure_ascii=False)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or pass overwrite=True")
    with whole(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_record(path: Path, study: str) -> dict[str, Any]:
    """Read the record of a study.

    Args:
      path: the file to read.
      study: the name of the study.

    Raises:
      ValueError: the file cannot be read, or is not a record of this study.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a record that can be read ({error})") from error
    if not isinstance(record, dict) or record.get("study") != study:
        raise ValueError(f"{path} is not a record of the study {study}")
    return record


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to JSON and back, so that resumed and uninterrupted runs give equal records."""
    return json.loads(json.dumps(_plain(value, "record")))


def environment() -> dict[str, Any]:
    """Return the versions, platform and device of a measurement, without host name and paths.

    Returns:
      A flat dictionary: the versions of Python, manifoldmuon, JAX, jaxlib, Optax and NumPy,
      `platform` (system and processor architecture), `backend`, `device_kind`, `device_count`
      and `cpu_count`.
    """
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "backend": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "cpu_count": os.cpu_count(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        return "unknown"


def _plain(value: Any, place: str) -> Any:
    """Convert `value` to JSON types; `place` names it in errors."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; the keys of a record are strings")
        return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if as_dict := getattr(value, "_asdict", None):  # a named tuple
        return _plain(as_dict(), place)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _plain_array(value, place)
    raise TypeError(
        f"{place} is a {type(value).__name__}, which JSON cannot hold; turn it into numbers, "
        "strings, lists or dictionaries first"
    )


def _plain_array(value: np.ndarray | np.generic | jax.Array, place: str) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{place} is a random key; record jax.random.key_data of it")
    array = np.asarray(value)
    # bfloat16 and float8 are not native NumPy floats; json rejects the output of their tolist().
    if jnp.issubdtype(array.dtype, np.floating):
        return _plain(array.astype(np.float64).tolist(), place)
    if array.dtype.kind in "biuU":
        return _plain(array.tolist(), place)
    raise TypeError(f"{place} is an array of {array.dtype}, which JSON cannot hold")
