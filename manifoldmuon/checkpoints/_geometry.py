"""The record of a geometry: every field of its manifolds as plain data, compared by value."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

import jax
import numpy as np

from manifoldmuon._internal.arguments import shown
from manifoldmuon.optim import Table


def record_geometry(table: Table) -> dict[str, Any]:
    """Return each field of manifold, layout and budget of every parameter, by a description.

    Raises:
      TypeError: a field is not data: a lambda, or an object that is no dataclass.
    """
    found: dict[str, Any] = {}
    for row in table.rows:
        for name in ("manifold", "layout", "budget"):
            _record(getattr(row, name), name, row.path, found)
    return found


def _record(value: Any, name: str, path: str, found: dict[str, Any]) -> None:
    key = f"the {name} of {path!r}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[key] = _public_name(type(value))
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        parts = {field: getattr(value, field) for field in fields}
    elif isinstance(value, tuple | list):
        found[key] = len(value)
        parts = dict(enumerate(value))
    else:
        found[key], parts = _plain(value, f"{path!r}: {name}"), {}
    for part, held in parts.items():
        _record(held, f"{name}.{part}", path, found)


def _plain(value: Any, what: str) -> Any:
    """Return a value as what JSON holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, enum.Enum | np.dtype):
        return value.name
    name = getattr(value, "__qualname__", "")  # of a function or a class, found again by its name
    if name and getattr(sys.modules.get(value.__module__), name, None) is value:
        return _public_name(value)
    raise TypeError(
        f"{what} is {shown(value)}, which no record can hold: make it a frozen dataclass or a"
        " function at the top of a module, or save without a table"
    )


def _public_name(value: Any) -> str:
    parts = [part for part in value.__module__.split(".") if not part.startswith("_")]
    return ".".join([*parts, value.__qualname__])
