"""Values with a defect, which the laws must find."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def broken(sound: T, **methods: Callable[..., Any]) -> T:
    """Return a copy of a manifold, norm or method with other methods.

    Args:
      sound: a frozen dataclass.
      methods: functions of `sound` and the arguments.
    """
    kind: Any = type(sound)
    own = {name: lambda self, *x, f=method: f(sound, *x) for name, method in methods.items()}
    fields = {field.name: getattr(sound, field.name) for field in dataclasses.fields(kind)}
    return type(f"Broken{kind.__name__}", (kind,), own)(**fields)
