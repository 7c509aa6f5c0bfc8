"""The representation of manifolds, norms and strategies: what differs from the defaults."""

from __future__ import annotations

import dataclasses


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
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        held = {f.name: (getattr(self, f.name), f.default) for f in fields if f.init and f.repr}
        shown = [f"{name}={value!r}" for name, (value, default) in held.items() if value != default]
        return f"{type(self).__name__}({', '.join(shown)})"
