"""Values with a defect, which the laws must find."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

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


@jax.custom_batching.custom_vmap
def doubled_in_vmap(x):
    """Return `x`, or `2 x` under `jax.vmap`."""
    return x


@doubled_in_vmap.def_vmap
def _(size, batched, x):
    return 2 * x, True
