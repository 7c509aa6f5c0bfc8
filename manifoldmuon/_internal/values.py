"""The representation of manifolds, norms and strategies: what differs from the defaults."""

from __future__ import annotations

import dataclasses
from typing import Any


class Value:
    """Base of frozen dataclasses whose `repr` leaves out the fields that are at their defaults.

    A dataclass keeps a `__repr__` only where the class defines one itself, so every subclass is
    given this one before its decorator runs.
    """

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Value.__repr__

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in changed_fields(self).items()]
        return f"{type(self).__name__}({', '.join(shown)})"


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a value that are shown and not at their defaults, by name."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    held = {f.name: (getattr(value, f.name), f.default) for f in fields if f.init and f.repr}
    return {name: kept for name, (kept, default) in held.items() if kept != default}
