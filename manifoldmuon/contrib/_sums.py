"""Non-negative matrices of given row and column sums: the nearest one, and scaling to one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Bool, Float

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.arrays import Matrices, Numbers, nonzero_or_one, upcast
from manifoldmuon._internal.mesh import match_varying_axes

_SHORTEST = 2.0**-12  # of a Newton step
_LARGEST = 1e4  # of an entry, in units of the mean one: beyond, float32 would lose the sums


def _center(x: Matrices) -> Matrices:
    """`P X P` with `P = I - 1 1^T / n` on each side: all rows and all columns sum to zero."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x - jnp.mean(x, axis=-2, keepdims=True)


def nearest_with_sums(x: Matrices, row_sum: float, max_iterations: int = 50) -> Matrices:
    """The nearest non-negative matrix with rows of sum r and columns of sum `r m / n`.

    It is `max(X + u 1^T + 1 v^T, 0)`, and a semismooth Newton method finds u and v: the dual is
    concave and piecewise quadratic (Li, Sun and Toh, arXiv:1702.05934, sections 2 and 3). Where no
    entry is negative once the sums are right, nothing is iterated; from afar it takes some five to
    fifteen steps, each of them products of a matrix and a vector. Should it stop early, what is
    missing is spread over the rows and columns that lack it, so that the result has the sums
    anyway. Entries beyond 1e4 times the mean of the result are cut there first.

    Args:
      x: matrices in the trailing two axes; leading axes are independent.
      row_sum: r, positive.
      max_iterations: where the iteration gives up.

    Returns:
      In float32 or wider; a NaN spreads over its own matrix. The derivative is that of the nearest
      matrix: entries of zero stay zero, and of the others the sums are kept.

    Examples:
      >>> nearest_with_sums(jnp.zeros((2, 2)), 1.0).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """
    check_number("row_sum", row_sum, within="(0, inf)")
    x, mean = upcast(x), row_sum / max(x.shape[-1], 1)
    if x.size == 0:
        return x
    flat = jnp.clip(x / mean, -_LARGEST, _LARGEST).reshape(-1, *x.shape[-2:])
    return mean * _nearest(flat, max_iterations)[0].reshape(x.shape)


def sinkhorn(logits: Matrices, row_sum: float, max_iterations: int = 200) -> Matrices:
    """`diag(a) exp(L) diag(b)` with rows of sum r and columns of sum `r m / n`.

    Rows and columns are divided by their sums in turn (Sinkhorn and Knopp 1967), until the rows
    are right to rounding. What a slow case lacks in the end, one close to a permutation, is spread
    as in `nearest_with_sums`.

    Args:
      logits: L; minus infinity is an entry of zero, where the others can have the sums without it.
        Leading axes are independent.
      row_sum: r, positive.
      max_iterations: where the iteration gives up.

    Returns:
      In float32 or wider; a NaN spreads over its own matrix. The derivative is that of the matrix
      that is balanced exactly.

    Examples:
      >>> sinkhorn(jnp.zeros((2, 2)), 1.0).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """
    check_number("row_sum", row_sum, within="(0, inf)")
    logits, mean = upcast(logits), row_sum / max(logits.shape[-1], 1)
    if logits.size == 0:
        return logits
    return mean * _balanced(logits, max_iterations)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _balanced(logits: Matrices, max_iterations: int) -> Matrices:
    """For a mean entry of 1."""
    top = jnp.max(logits, axis=(-2, -1), keepdims=True)
    start = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0, top))
    tolerance = 4 * _tolerance(start)

    def unfinished(carry):
        count, _, error = carry
        return (count < max_iterations) & jnp.any(error > tolerance)

    def step(carry):
        count, x, _ = carry
        x = _divided(_divided(x, -2), -1)
        return count + 1, x, _error(x)

    _, x, _ = jax.lax.while_loop(unfinished, step, (0, start, jnp.full_like(top[..., 0, 0], 1)))
    return _filled(x)


@_balanced.defjvp
def _balanced_jvp(max_iterations, primals, tangents):
    """Adding to logits and to their rows and columns scales entries: the sums have to stay."""
    found = _balanced(primals[0], max_iterations)
    return found, found * _without_sums(found, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1)
@functools.partial(jax.vmap, in_axes=(0, None))
def _nearest(
    x: Float[Array, "m n"], max_iterations: int
) -> tuple[Float[Array, "m n"], Bool[Array, "m n"]]:
    """For a mean entry of 1; and which entries are positive, except those filled in."""
    y = _center(x) + 1
    m, n = y.shape
    tolerance = _tolerance(y) * (1 + jnp.max(jnp.abs(y)))

    def at(u, v):
        found = jnp.maximum(y + u[:, None] + v[None, :], 0)
        return found, n - jnp.sum(found, axis=1), m - jnp.sum(found, axis=0)

    def unfinished(carry):
        count, _, _, error = carry
        return (count < max_iterations) & (error > tolerance)

    def step(carry):
        count, u, v, error = carry
        found, right, below = at(u, v)
        active = (found > 0).astype(y.dtype)
        # Where the active entries fall apart into blocks, their Laplacian is singular.
        damping = 1e-3 * jnp.minimum(error, 1) + 10 * jnp.finfo(y.dtype).eps
        du, dv = _potentials(active, right, below, damping, 1e-3)
        slope = right @ du + below @ dv
        value = jnp.sum(found**2) / 2 - n * jnp.sum(u) - m * jnp.sum(v)
        slack = 10 * jnp.finfo(y.dtype).eps * (jnp.abs(value) + m * n)

        def too_long(t):
            moved, _, _ = at(u + t * du, v + t * dv)
            now = jnp.sum(moved**2) / 2 - n * jnp.sum(u + t * du) - m * jnp.sum(v + t * dv)
            return (t > _SHORTEST) & (now > value - 1e-4 * t * slope + slack)

        t = jax.lax.while_loop(too_long, lambda t: t / 2, jnp.ones((), y.dtype))
        u, v = u + t * du, v + t * dv
        return count + 1, u, v, _error(at(u, v)[0])

    u, v = match_varying_axes((jnp.zeros(m, y.dtype), jnp.zeros(n, y.dtype)), y)
    start = (0, u, v, _error(jnp.maximum(y, 0)))
    _, u, v, _ = jax.lax.while_loop(unfinished, step, start)
    found, _, _ = at(u, v)
    return _filled(found), found > 0


@_nearest.defjvp
def _nearest_jvp(max_iterations, primals, tangents):
    """Project a change onto the face of the set that the point is on."""
    found, active = _nearest(primals[0], max_iterations)
    weights = active.astype(found.dtype)
    moved = weights * _without_sums(weights, tangents[0])
    return (found, active), (moved, jax.custom_derivatives.zero_from_primal(active))


@functools.partial(jnp.vectorize, signature="(m,n),(m,n)->(m,n)")
def _without_sums(weights: Float[Array, "m n"], change: Float[Array, "m n"]):
    """`E + u 1^T + 1 v^T` whose entries, each with its weight, sum to zero in rows and columns."""
    eps = float(jnp.finfo(change.dtype).eps)
    for _ in range(2):  # the second takes out what the first leaves; beyond, rounding would grow
        left = weights * change
        right, below = -jnp.sum(left, axis=1), -jnp.sum(left, axis=0)
        du, dv = _potentials(weights, right, below, 10 * eps, eps**0.5)
        change = change + du[:, None] + dv[None, :]
    return change


def _potentials(
    weights: Float[Array, "m n"],
    right: Float[Array, " m"],
    below: Float[Array, " n"],
    damping: Any,
    tolerance: float,
) -> tuple[Float[Array, " m"], Float[Array, " n"]]:
    """The u and v for which the entries of `u 1^T + 1 v^T`, with weights, have the given sums."""
    rows, columns = (jnp.sum(weights, axis=k) + damping for k in (1, 0))

    def schur(d):
        return columns * d - weights.T @ ((weights @ d) / rows)

    def solve(operator, b):
        return cg(operator, b, maxiter=2 * len(b), tol=tolerance, M=lambda d: d / columns)[0]

    # `cg` alone cannot be transposed: JAX takes its start, zero, for a variable.
    start = below - weights.T @ (right / rows)
    v = jax.lax.custom_linear_solve(schur, start, solve, symmetric=True)
    return (right - weights @ v) / rows, v


def _tolerance(x: Matrices) -> float:
    return 4 * float(jnp.finfo(x.dtype).eps)


def _error(x: Matrices) -> Numbers:
    """The largest relative error of a sum, for a mean entry of 1."""
    away = [jnp.max(jnp.abs(jnp.mean(x, axis=k) - 1), axis=-1) for k in (-2, -1)]
    return jnp.maximum(*away)


def _divided(x: Matrices, axis: int) -> Matrices:
    mean = jnp.mean(x, axis=axis, keepdims=True)
    return x / nonzero_or_one(mean)


def _filled(x: Matrices) -> Matrices:
    """The sums made right, in any case.

    Sums nearly right are divided by; otherwise what exceeds is scaled down and what lacks is filled
    by a matrix of rank one (Altschuler, Weed and Rigollet, arXiv:1705.09634, algorithm 2).
    """
    for axis in (-2, -1, -2, -1):
        x = _divided(x, axis)
    less = x
    for axis in (-1, -2):
        less = less / jnp.maximum(jnp.mean(less, axis=axis, keepdims=True), 1)
    right = 1 - jnp.mean(less, axis=-1, keepdims=True)
    below = 1 - jnp.mean(less, axis=-2, keepdims=True)
    right, below = jnp.maximum(right, 0), jnp.maximum(below, 0)
    total = jnp.mean(right, axis=-2, keepdims=True)
    whole = less + right * below / nonzero_or_one(total)
    done = _error(x) <= _tolerance(x)
    return jnp.where(done[..., None, None], x, whole)
