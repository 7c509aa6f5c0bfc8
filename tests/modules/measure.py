"""Norms of inputs and outputs, and measured sensitivities, by NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rms(x: Any, axes: int = 1) -> np.ndarray:
    """The RMS norm over the trailing axes."""
    x = np.asarray(x, np.float64)
    return np.sqrt(np.mean(x**2, axis=tuple(range(-axes, 0))))


def tokens(x: Any) -> float:
    """The largest RMS norm of a token, a pixel or a vector of a batch."""
    return float(np.max(rms(x)))


def largest(x: Any) -> float:
    """The largest magnitude."""
    return float(np.max(np.abs(np.asarray(x, np.float64))))


def total(*norms: Any) -> Any:
    """The norm of a tuple: the sum of its parts' norms."""
    return lambda x: sum(norm(part) for norm, part in zip(norms, x, strict=True))


def gaussian(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def unit_tokens(seed: int, *shape: int) -> jax.Array:
    """Random vectors of RMS norm 1 in the last axis."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x / rms(x)[..., None], jnp.float32)


def push(function: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """The directional derivative, compiled once for each function."""
    return jax.jit(lambda p, t: jax.jvp(function, p, t)[1])(primals, tangents)


def push_twice(function: Any, x: Any, first: Any, second: Any) -> Any:
    """The second directional derivative of a function of one argument."""

    def once(p):
        return jax.jvp(function, (p,), (first,))[1]

    return jax.jit(lambda p, t: jax.jvp(once, (p,), (t,))[1])(x, second)
