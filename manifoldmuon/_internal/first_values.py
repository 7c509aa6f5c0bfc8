"""Checks of first values, which a compiled `init` knows only when it runs."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

_checked = contextvars.ContextVar("_checked", default=True)


@contextlib.contextmanager
def unchecked_values() -> Generator[None]:
    """Leave out checks of first values, in eager and in traced code."""
    token = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(token)


def values_are_checked() -> bool:
    """Return whether first values are checked."""
    return _checked.get()


def is_traced(tree: Any = ()) -> bool:
    """Return whether `jax.jit` traces this code, which traces even constants, or a leaf."""
    return any(isinstance(x, Tracer) for x in (jnp.zeros(()), *jax.tree.leaves(tree)))


def check_values(check: Callable[..., None], values: Sequence[jax.Array]) -> None:
    """Let `check(*values)` raise when a compiled program runs.

    The program then raises a `JaxRuntimeError` that ends in the error of `check`. Every device
    calls `check` with the same scalars, and all of them stop: if a single device raised, the others
    would wait for it in the next collective. TPUs have no such callback: there it warns. Backends
    without callbacks skip the check.

    The values are scalars, since a vector could be divided over devices. Over a batch axis of
    `jax.vmap` the largest counts.
    """

    def warn(*values: Any) -> None:
        try:
            check(*values)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)

    def call(function: Callable[..., None], partitioned: bool) -> Callable[..., None]:
        return lambda *x: jax.debug.callback(function, *x, partitioned=partitioned)

    stop, tell = call(check, True), call(warn, False)
    worst = [_largest_of_batch(jax.lax.stop_gradient(x)) for x in values]
    # JAX lowers callbacks for platforms that are present, but programs for others, too.
    accelerators = {"gpu": {"cuda": stop, "rocm": stop}, "tpu": {"tpu": tell}}
    present = accelerators.get(jax.default_backend(), {})
    jax.lax.platform_dependent(*worst, cpu=stop, **present, default=lambda *_: None)


@jax.custom_batching.custom_vmap
def _largest_of_batch(x: jax.Array) -> jax.Array:
    return x


@_largest_of_batch.def_vmap
def _(axis_size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    # Callbacks are repeated for every element of a batch.
    return _largest_of_batch(jnp.max(x, axis=0) if batched[0] else x), False
