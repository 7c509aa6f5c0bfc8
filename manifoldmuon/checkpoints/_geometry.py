"""The record of a geometry: plain data with every field, compared by value."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from manifoldmuon._internal.arguments import shown
from manifoldmuon.optim import Table

# Old names and new ones: of a class, `package.Class`, and of a field, by the class's new name,
# `package.Class.field`. The new name of a field is the field alone.
RENAMED: dict[str, str] = {}


def record_geometry(table: Table) -> dict[str, Any]:
    """Return manifold, layout and budget of each parameter as plain data, by path."""
    fields = "manifold", "layout", "budget"
    return {
        row.path: {name: _plain(getattr(row, name), f"{row.path!r}: {name}") for name in fields}
        for row in table.rows
    }


def _plain(value: Any, what: str) -> Any:
    """Return a value as what JSON holds; a dataclass by its public name and all of its fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item, what) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if isinstance(value, enum.Enum | np.dtype):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        held = {name: _plain(getattr(value, name), f"{what}.{name}") for name in names}
        return {"class": _public_name(type(value)), "fields": held}
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


def entries_of(geometry: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value of a recorded geometry, by the names that its field and class have now."""

    def visit(value: Any, field: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            yield field, value
            return
        kind = RENAMED.get(value["class"], value["class"])
        yield field, kind
        for name, held in value["fields"].items():
            yield from visit(held, f"{field}.{RENAMED.get(f'{kind}.{name}', name)}")

    rows = [(path, *column) for path, row in geometry.items() for column in row.items()]
    return {f"the {f} of {path!r}": v for path, name, x in rows for f, v in visit(x, name)}
