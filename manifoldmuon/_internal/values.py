"""The `repr` of manifolds, norms and strategies, limited to fields changed from the defaults."""

from __future__ import annotations

import dataclasses
from typing import Any


class Value:
    """Base of frozen dataclasses with a `repr` that omits fields at their defaults.

    A dataclass keeps `__repr__` only if the class itself defines it, so every subclass gets this
    `__repr__` before its decorator runs.
    """

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Value.__repr__

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in changed_fields(self).items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields in the `repr` of a value that differ from their defaults, by name."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    held = {f.name: (getattr(value, f.name), f.default) for f in fields if f.init and f.repr}
    return {name: kept for name, (kept, default) in held.items() if kept != default}
