"""Norms of inputs and outputs, directional derivatives, and optimizer steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon import optim
from manifoldmuon.modules import Module
from manifoldmuon.norms import PowerIterations
from tests.tolerances import rounding


def rms(x: Any, axes: int = 1) -> np.ndarray:
    """Return the RMS norm over the trailing axes."""
    x = np.asarray(x, np.float64)
    return np.sqrt(np.mean(x**2, axis=tuple(range(-axes, 0))))


def tokens(x: Any) -> float:
    """Return the largest RMS norm of a token, pixel or vector in a batch."""
    return float(np.max(rms(x)))


def largest(x: Any) -> float:
    """Return the largest magnitude."""
    return float(np.max(np.abs(np.asarray(x, np.float64))))


def gaussian(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def unit_tokens(seed: int, *shape: int) -> jax.Array:
    """Draw random vectors of RMS norm 1 along the last axis."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x / rms(x)[..., None], jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def push(function: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """Return the directional derivative, compiled once per function."""
    return jax.jvp(function, primals, tangents)[1]


@functools.partial(jax.jit, static_argnums=0)
def push_twice(function: Any, x: Any, first: Any, second: Any) -> Any:
    """Return the second directional derivative of a unary function."""
    return jax.jvp(lambda p: jax.jvp(function, (p,), (first,))[1], (x,), (second,))[1]


def random_like(tree: Any, seed: int = 0) -> Any:
    """Draw Gaussian entries in the shapes and dtypes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


@functools.cache
def shapes_of(net: Module) -> Any:
    """Return the shapes of `init`, traced once."""
    return jax.eval_shape(lambda: net.init(jax.random.key(0)))


def steepest_step(net: Module, grads: Any, params: Any) -> Any:
    """Return the steepest ascent step of modular norm 1, by the optimizer's transformations."""
    links = optax.chain(
        optim.scale_by_steepest(net.geometry()), optim.scale_by_budget(net.budgets())
    )
    return links.update(grads, links.init(params), params)[0]


def assert_steps_agree(found: Any, expected: Any, name: str = "") -> None:
    """Compare structures, and leaves relative to their largest entry.

    The tolerance is for msign with four products per step and condition numbers up to 100.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected), name
    close = rounding(4, 16, condition=100)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=close * largest(other), err_msg=name)


def normalized(net: Module, updates: Any, params: Any) -> Any:
    """Scale each leaf of the updates to its target norm, by `optim.normalize`.

    Enough power iterations make the spectral norm exact.
    """
    exact = PowerIterations(cold_start_steps=500)
    link = optim.normalize(optax.identity(), net.geometry(), net.budgets(), iterations=exact)
    return link.update(updates, link.init(params), params)[0]
