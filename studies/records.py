"""Records: results and environment of a measurement, as strict JSON, written atomically."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PACKAGES = ("manifoldmuon", "jax", "jaxlib", "optax", "numpy")


class WriteError(OSError):
    """A full or read-only disk; the message is a line with advice."""

    def __init__(self, path: Path, error: OSError):
        super().__init__(
            f"cannot write {path} ({error.strerror or error}); what was saved before is unchanged: "
            "make room or choose another folder"
        )


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
        raise WriteError(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_record(
    path: str | os.PathLike[str], record: Mapping[str, Any], overwrite: bool = False
) -> Path:
    """Write `record` to `path` as JSON, atomically, and return the path. See `plain`.

    Raises:
      FileExistsError: `path` exists and `overwrite` is false.
      TypeError: JSON cannot hold a value.
      WriteError: the disk is full or read-only.
    """
    path = Path(path)
    text = json.dumps(_plain(record), indent=2, allow_nan=False, ensure_ascii=False)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or pass overwrite=True")
    with whole(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_record(path: Path, study: str | None = None) -> dict[str, Any]:
    """Read a record.

    Args:
      path: the file to read.
      study: the name of its study; None accepts every study.

    Raises:
      ValueError: the file cannot be read, or is not a record of this study.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a record ({error})") from error
    if not isinstance(record, dict) or study not in (None, record.get("study")):
        raise ValueError(f"{path} is not a record of the study {study}")
    return record


def plain(value: Any) -> Any:
    """Convert to JSON and back, so that resumed and uninterrupted runs give equal records.

    NumPy and JAX scalars become numbers, arrays become nested lists, tuples become lists, named
    tuples become objects. NaN and infinity, which JSON lacks, become `null`.
    """
    return json.loads(json.dumps(_plain(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if as_dict := getattr(value, "_asdict", None):  # a named tuple
        return _plain(as_dict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        # json rejects the numbers of bfloat16 and float8, which are not native to NumPy.
        wide = array.astype(np.float64) if jnp.issubdtype(array.dtype, np.floating) else array
        return _plain(wide.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def environment() -> dict[str, Any]:
    """Return the versions, platform and device of a measurement, without host name and paths.

    Returns:
      A flat dictionary: the versions of Python, manifoldmuon, JAX, jaxlib, Optax and NumPy,
      `platform` (system and processor architecture), `processor` (its name), `backend`,
      `device_kind`, `device_count` and `cpu_count`.
    """
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "backend": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "cpu_count": os.cpu_count(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return name[1] if name else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
