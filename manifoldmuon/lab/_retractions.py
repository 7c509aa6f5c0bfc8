"""Retractions: their order, and random walks that show drift and step lengths."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from manifoldmuon._internal.matrices.arrays import expand_trailing
from manifoldmuon.manifolds import Manifold
from manifoldmuon.testing import error_slope

# Halving from 2**-3 to 2**-7: small enough for the leading term, far above float64's rounding.
TIMES = tuple(2.0**-k for k in range(3, 8))


class RetractionOrder(NamedTuple):
    """Result of `retraction_order`."""

    times: tuple[float, ...]
    errors: Float[np.ndarray, " times"]
    slope: float | None


def retraction_order(
    manifold: Manifold, exact: Manifold, shape: tuple[int, ...], key: PRNGKeyArray
) -> RetractionOrder:
    """Measure the order of a retraction in float64, along a random tangent.

    Args:
      manifold: manifold with the retraction to measure.
      exact: the same manifold with a retraction along geodesics.
      shape: shape of the point: `manifold.ndim` axes.
      key: seeds the point and the tangent.

    Returns:
      A named tuple: `times`, step lengths in the manifold's norm; `errors`, distances from the
      geodesic in the same norm; `slope`, the exponent of the errors, which is the order plus 1, or
      None if the errors are only rounding.

    Examples:
      >>> exact = mm.manifolds.Hypersphere(ndim=2, retraction=mm.manifolds.retractions.Geodesic())
      >>> sphere = mm.manifolds.Hypersphere(ndim=2)
      >>> round(retraction_order(sphere, exact, (4, 3), jax.random.key(0)).slope, 1)
      3.0
    """
    _check_axes(manifold, shape)
    with jax.enable_x64(True):
        errors = np.asarray(jax.jit(functools.partial(_step_errors, manifold, exact, shape))(key))
    slope = error_slope(TIMES, errors)
    return RetractionOrder(TIMES, errors, None if slope == math.inf else slope)


def _check_axes(manifold: Manifold, shape: tuple[int, ...]) -> None:
    if len(shape) != manifold.ndim:
        raise ValueError(f"shape must have {manifold.ndim} axes, as a point has; got {shape}")


def _step_errors(manifold: Manifold, exact: Manifold, shape: tuple[int, ...], key: Any) -> Any:
    """Return the errors of steps of all lengths along a random direction of norm 1."""
    point_key, key = jax.random.split(key)
    point = manifold.random_point(point_key, shape, jnp.float64)
    vector = manifold.project_tangent(point, jax.random.normal(key, shape, jnp.float64))
    vector = expand_trailing(jnp.array(TIMES), point.ndim) * (vector / manifold.norm.norm(vector))
    points = jnp.broadcast_to(point, vector.shape)
    missed = manifold.retract(points, vector) - exact.retract(points, vector)
    return jax.vmap(manifold.norm.norm)(missed)


class RandomWalk(NamedTuple):
    """Result of `random_walk`."""

    at: list[int]
    points: Float[np.ndarray, "moments rates *shape"]
    effective: Float[np.ndarray, " rates"]


def random_walk(
    manifold: Manifold,
    shape: tuple[int, ...],
    rates: tuple[float, ...],
    steps: int,
    key: PRNGKeyArray,
    dtype: Any = jnp.float32,
) -> RandomWalk:
    """Walk along steepest directions of fresh Gaussian gradients.

    Points are kept in `dtype`, the arithmetic is in float32. Measure their drift from the set by
    `manifold.distance` or, better, by a computation in float64.

    Args:
      manifold: manifold with the retraction to measure.
      shape: shape of a point: `manifold.ndim` axes.
      rates: positive step lengths, a walk for each.
      steps: number of steps; at least 1.
      key: seeds the first points and the gradients.
      dtype: dtype of the points.

    Returns:
      A named tuple: `at`, the numbers of the recorded steps, which are 1, 10, 100, ... and the
      last; `points` after these steps, of shape `(moments, rates, *shape)`; `effective`, the length
      of each walk's first step in the manifold's norm, divided by the rate.

    Examples:
      >>> random_walk(mm.manifolds.EmbeddingRows(), (3, 4), (0.1,), 20, jax.random.key(0)).at
      [1, 10, 20]
    """
    _check_axes(manifold, shape)
    if steps < 1 or not rates or min(rates) <= 0:
        raise ValueError(f"steps must be at least 1 and rates positive; got {steps} and {rates}")
    start_key, key = jax.random.split(key)
    points = manifold.random_point(start_key, (len(rates), *shape), jnp.dtype(dtype))
    at = [10**k for k in range(len(str(steps)))]
    at += [steps] * (at[-1] != steps)
    visited = [points]
    for done, stop in zip([0, *at], at, strict=False):
        lengths = jnp.array(rates, jnp.float32)
        visited.append(_advance(manifold)(visited[-1], lengths, key, done, stop))
    with jax.enable_x64(True):
        first = np.asarray(visited[1], np.float64) - np.asarray(points, np.float64)
        effective = np.asarray(jax.vmap(manifold.norm.norm)(jnp.asarray(first))) / np.asarray(rates)
    return RandomWalk(at, np.stack([np.asarray(p) for p in visited[1:]]), effective)


@functools.lru_cache(maxsize=1)
def _advance(manifold: Manifold) -> Any:
    """Return the compiled walk between two steps, for all rates."""

    @jax.jit
    def advance(points, rates, key, start, stop):
        def step(k, points):
            grad = jax.random.normal(jax.random.fold_in(key, k), points.shape)
            wide = points.astype(jnp.float32)
            direction = manifold.steepest(wide, grad, manifold.init_dual(points.shape)).direction
            vector = expand_trailing(rates, points.ndim - 1) * direction
            return manifold.retract(points, vector).astype(points.dtype)

        return jax.lax.fori_loop(start, stop, step, points)

    return advance
