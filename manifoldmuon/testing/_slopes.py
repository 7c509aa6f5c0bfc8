"""Check laws in the limit of small steps, by the slope of an error over decades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon.manifolds import Manifold
from manifoldmuon.testing._assertions import normal, require

# Two and a half decades: the leading term dominates, and float64 still resolves a cube.
LENGTHS = tuple(10.0 ** (-1 - k / 2) for k in range(6))

# The leading term of a single cost may nearly vanish by chance.
_COSTS = 8


def error_slope(
    lengths: Sequence[float], errors: Sequence[Any] | np.ndarray, rounding: float = 1e-12
) -> float:
    """Return the exponent p of `error = C * length**p`, fitted on logarithmic axes.

    Args:
      lengths: lengths of the steps, decreasing.
      errors: an error for each length.
      rounding: errors up to this size are ignored.

    Returns:
      The exponent; infinity if fewer than two errors are above `rounding`.

    Examples:
      >>> round(error_slope([0.1, 0.01], [1e-3, 1e-5]), 6)
      2.0
    """
    pairs = [(t, e) for t, e in zip(lengths, errors, strict=True) if not e <= rounding]
    if len(pairs) < 2:
        return math.inf
    steps, values = np.log(np.array(pairs)).T
    return float(np.polyfit(steps, values, 1)[0])


def check_slopes(
    manifold: Manifold, shape: tuple[int, ...], key: PRNGKeyArray, order: int | float = 1
) -> None:
    """Check `retract` and `project_tangent` by slopes over two and a half decades, in float64.

    For a random point p, a random tangent vector v of norm 1 and random quadratic costs f, whose
    errors count together:

    * `retract(p, t v) - p - t v` falls like t^2;
    * `f(retract(p, t v)) - f(p) - t <project_tangent(p, grad f), v>` falls like t^2 (the
      gradient check of pymanopt and Manopt);
    * for a retraction of second order the tangent part of `retract(p, t v) - p - t v` falls like
      t^3 (Absil, Mahony and Sepulchre 2008, Proposition 5.5.5), else like t^2:
      `project_tangent(p, q - p)` is an inverse retraction;
    * for a retraction of second order `f(retract(p, t v))` minus its Taylor series falls like t^3,
      with the projected derivative of the projected gradient as Riemannian Hessian.

    Args:
      manifold: manifold to check.
      shape: shape of a point.
      key: seeds the random arrays.
      order: order of the retraction, 1 or more.

    Raises:
      AssertionError: a law is broken; the message names it, the slope and the errors.

    Examples:
      >>> check_slopes(mm.manifolds.Hypersphere(), (5,), jax.random.key(0), order=2)
    """
    with jax.enable_x64(True):
        errors = jax.jit(lambda *arrays: _taylor_errors(manifold, *arrays))
        point = manifold.random_point(key, shape, jnp.float64)
        (vector,), costs = normal(key, shape, 1), normal(key, (_COSTS, *shape), 2)
        drawn = (x.astype(np.float64) for x in (vector, *costs))
        straight, bent, first, second = map(np.asarray, errors(point, *drawn))
    laws = [
        ("retract(p, t v) = p + t v + O(t^2)", straight, 2),
        ("f(retract(p, t v)) = f(p) + t <project_tangent(p, grad f), v> + O(t^2)", first, 2),
        ("project_tangent(p, retract(p, t v) - p - t v) = O(t^3)", bent, 3 if order >= 2 else 2),
    ]
    if order >= 2:
        law = "f(retract(p, t v)) = f(p) + t <grad f, v> + t^2/2 <v, Hess f[v]> + O(t^3)"
        laws.append((law, second, 3))
    for law, found, wanted in laws:
        slope = error_slope(LENGTHS, found)
        require(law, slope >= wanted - 0.1, f"slope {slope:.3g}, errors {found}")


def _taylor_errors(
    manifold: Manifold, point: Array, vector: Array, linear: Array, square: Array
) -> tuple[Array, ...]:
    """Return errors for all `LENGTHS`.

    In this order: the step, its tangent part, the costs' Taylor series to first and second order.
    """
    size = lambda x: jnp.sqrt(jnp.sum(x * x))  # noqa: E731
    vector = manifold.project_tangent(point, vector)
    vector = vector / jnp.maximum(jnp.max(manifold.norm.norm(vector)), 1e-30)

    def costs(x: Array) -> Array:
        return jnp.sum((linear * x + square * x * x / 2).reshape(len(linear), -1), axis=1)

    def gradients(x: Array) -> Array:
        return jax.vmap(lambda grad: manifold.project_tangent(x, grad))(linear + square * x)

    def along(gradients: Array) -> Array:
        return jnp.sum((gradients * vector).reshape(len(linear), -1), axis=1)

    slopes = along(gradients(point))
    # The derivatives' normal parts are orthogonal to the vector.
    bends = along(jax.jvp(gradients, (point,), (vector,))[1])

    def at(t: Array) -> tuple[Array, ...]:
        moved = manifold.retract(point, t * vector)
        missed = moved - point - t * vector
        first = costs(moved) - costs(point) - t * slopes
        bent = size(manifold.project_tangent(point, missed))
        return size(missed), bent, size(first), size(first - t * t / 2 * bends)

    return jax.lax.map(at, jnp.array(LENGTHS))
