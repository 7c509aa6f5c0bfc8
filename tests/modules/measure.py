"""Norms of inputs and outputs, measured sensitivities, and the steps of the optimizer's links."""

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


@functools.partial(jax.jit, static_argnums=0)
def push(function: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """The directional derivative, compiled once for each function."""
    return jax.jvp(function, primals, tangents)[1]


@functools.partial(jax.jit, static_argnums=0)
def push_twice(function: Any, x: Any, first: Any, second: Any) -> Any:
    """The second directional derivative of a function of one argument."""

    def once(p):
        return jax.jvp(function, (p,), (first,))[1]

    return jax.jvp(once, (x,), (second,))[1]


def random_like(tree: Any, seed: int = 0) -> Any:
    """Gaussian entries, in the shapes and dtypes of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


@functools.cache
def shapes_of(net: Module) -> Any:
    """The tree of `init`, traced once and not computed."""
    return jax.eval_shape(lambda: net.init(jax.random.key(0)))


def steepest_step(net: Module, grads: Any, params: Any) -> Any:
    """The step of modular norm 1 that ascends the fastest, by the optimizer's links."""
    links = optax.chain(
        optim.scale_by_steepest(net.geometry()), optim.scale_by_budget(net.budgets())
    )
    return links.update(grads, links.init(params), params)[0]


def assert_steps_agree(found: Any, expected: Any, name: str = "") -> None:
    """In structure, and each leaf relative to its largest entry.

    By msign of matrices with condition numbers up to 100, in steps of four products.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected), name
    close = rounding(4, 16, condition=100)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=close * largest(other), err_msg=name)


def normalized(net: Module, updates: Any, params: Any) -> Any:
    """Each leaf of the updates at its target norm, by the optimizer's link.

    With as many power iterations as the spectral norm takes to be exact.
    """
    link = optim.normalize(
        optax.identity(),
        net.geometry(),
        net.budgets(),
        iterations=PowerIterations(cold_start_steps=500),
    )
    return link.update(updates, link.init(params), params)[0]
