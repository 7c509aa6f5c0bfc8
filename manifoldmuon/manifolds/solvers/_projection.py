"""Steepest directions by projection onto a tangent space, guarded against rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats, Matrices, Numbers
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, to_unit_norm
from manifoldmuon._internal.matrices.spectral import nuclear_parts
from manifoldmuon.linalg import msign
from manifoldmuon.norms import Norm, Spectral


def euclidean_direction(
    grad: Floats, tangent: Callable[[Any], Any], ndim: int
) -> tuple[Floats, Floats, Floats]:
    """Return the normalised tangent part of each gradient: steepest in the Euclidean norm.

    If a gradient is normal to the set, its tangent part consists of rounding errors; normalising it
    would turn noise into a full step. The direction is therefore zero if the tangent part is below
    a few units of rounding of the gradient.

    Args:
      grad: gradients at any scale, float32 or wider.
      tangent: the orthogonal projection onto the tangent space, for arrays of moderate size.
      ndim: number of trailing axes of a gradient.

    Returns:
      `(direction, gap, residual)`: unit or zero arrays, float32 or wider; the gap of each
      direction, possible rotation by rounding included; and the length of the normal part of each
      direction before a second projection.

    Examples:
      >>> last = lambda v: v.at[0].set(0)  # keep the last entry
      >>> direction, _, _ = euclidean_direction(jnp.array([3.0, 4.0]), last, 1)
      >>> direction.tolist()
      [0.0, 1.0]
    """
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    projected = tangent(scaled)
    length, whole = arrays.frobenius_norm(projected, ndim), arrays.frobenius_norm(scaled, ndim)
    eps = float(jnp.finfo(scaled.dtype).eps)
    noise = 8 * eps * whole
    significant = ~(length <= noise)
    # Project again: the first pass leaves a relatively large normal part in a small tangent part.
    direction = to_unit_norm(projected, ndim)
    again = tangent(direction)
    residual = jnp.where(significant, arrays.frobenius_norm(direction - again, ndim), 0)
    turned = noise / arrays.nonzero_or_one(length)
    # Rounding leaves some of the normal part; its cost grows with the normal share of the gradient.
    normal = jnp.maximum(4 * eps, turned / 4)
    gap = jnp.where(whole == 0, 0, jnp.where(significant, turned**2 + normal, 1))
    # `significant` negates `<=`, so it is true for NaN: a NaN has to stay.
    direction = jnp.where(arrays.expand_trailing(significant, ndim), to_unit_norm(again, ndim), 0)
    return direction, gap, residual


def projected_direction(
    grad: Matrices, tangent: Callable[[Any], Any], norm: Norm
) -> tuple[Matrices, Numbers, Numbers]:
    """Apply the duality map to the tangent part of each gradient.

    The result is steepest if the duality map keeps the tangent space: always for the Frobenius
    norm; for the spectral norm if the projection is `X -> P X Q` with orthogonal projections P and
    Q, because a polar factor has the row and column space of its matrix. A method of msign enlarges
    rounding errors outside these spaces; they are projected out again and give the residual. If
    the tangent part is only rounding errors, the direction is zero and the gap 1.

    Args:
      grad: gradients at any scale, float32 or wider.
      tangent: the orthogonal projection onto the tangent space, for arrays of moderate size.
      norm: the norm of steps; the caller applies its scale.

    Returns:
      `(direction, gap, residual)`: directions of norm at most 1 at unit scale, float32 or wider;
      a bound, rounding included, on the share of the optimum that each direction misses; and
      `||A - P A Q||_F / k` for the direction A before its projection, with k the smaller side.

    Examples:
      >>> upper = lambda v: v.at[1:].set(0)  # keep the first row
      >>> direction, _, _ = projected_direction(jnp.ones((2, 2)), upper, mm.norms.Spectral())
      >>> direction.round(3).tolist()
      [[0.7070000171661377, 0.7070000171661377], [0.0, 0.0]]
    """
    if not isinstance(norm, Spectral):
        return euclidean_direction(grad, tangent, 2)
    scaled, _ = scale_to_unit_exponent(grad, 2)
    projected = tangent(scaled)
    length, whole = arrays.frobenius_norm(projected), arrays.frobenius_norm(scaled)
    eps, side = float(jnp.finfo(scaled.dtype).eps), min(grad.shape[-2:])
    significant = ~(length <= 8 * eps * whole)
    sign = msign(projected, norm.method)
    direction = tangent(sign)
    residual = arrays.frobenius_norm(sign - direction) / max(side, 1)
    gained, missed = nuclear_parts(projected, sign)
    # Bounds the nuclear norm of the rounding errors in the tangent part.
    noise = (side + 4) * eps * whole
    gap = arrays.relative_gap(
        gained + missed + noise, arrays.inner_product(projected, direction) - noise
    )
    gap = jnp.where(whole == 0, 0, jnp.where(significant, gap, 1))
    residual = jnp.where(significant, residual, 0)
    return jnp.where(arrays.expand_trailing(significant, 2), direction, 0), gap, residual
