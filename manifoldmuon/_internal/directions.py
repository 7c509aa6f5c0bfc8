"""Steepest directions by projection onto a tangent space, guarded against rounding errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import (
    Floats,
    Matrices,
    Numbers,
    expand_trailing,
    frobenius_norm,
    inner_product,
    nonzero_or_one,
    product,
    relative_gap,
    rounding_loss,
    tall,
    trailing,
    upcast,
)
from manifoldmuon._internal.matrices.polar import largest_row_sum
from manifoldmuon._internal.matrices.powers_of_two import (
    normalize,
    scale_to_unit_exponent,
    times_power_of_two,
)
from manifoldmuon._internal.matrices.spectral import nuclear_parts, spectral_bound
from manifoldmuon.linalg import msign
from manifoldmuon.norms import Norm, Spectral


def euclidean_direction(
    grad: Floats, tangent: Callable[[Any], Any], ndim: int, magnified: float = 1.0
) -> tuple[Floats, Floats, Floats]:
    """Return the normalised tangent part of each gradient: steepest in the Euclidean norm.

    If a gradient is normal to the set, its tangent part consists of rounding errors; normalising it
    would turn noise into a full step. The direction is therefore zero if the tangent part is below
    a few units of rounding of the gradient.

    Args:
      grad: gradients at any scale, in their original dtype, which sets their rounding error.
      tangent: the orthogonal projection onto the tangent space, for arrays of moderate size.
      ndim: number of trailing axes of a gradient.
      magnified: factor by which the projection magnifies rounding errors.

    Returns:
      `(direction, gap, residual)`: unit or zero arrays, float32 or wider; the gap of each
      direction, possible rotation by rounding included; and the length of the normal part of each
      direction before a second projection.
    """
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    part = tangent(scaled)
    length, whole = frobenius_norm(part, ndim), frobenius_norm(scaled, ndim)
    unit = float(jnp.finfo(scaled.dtype).eps)
    noise, loss = 8 * magnified * unit * whole, rounding_loss(grad.dtype)
    significant = ~(length <= jnp.maximum(noise, loss * whole))
    # Project again: the first pass leaves a relatively large normal part in a small tangent part.
    direction = normalize(part, ndim)
    again = tangent(direction)
    residual = jnp.where(significant, frobenius_norm(direction - again, ndim), 0)
    turned = noise / nonzero_or_one(length)
    # Rounding leaves some of the normal part; its cost grows with the normal share of the gradient.
    normal = jnp.maximum(4 * unit, turned / 4) + loss * (whole / nonzero_or_one(length) - 1)
    gap = jnp.where(whole == 0, 0, jnp.where(significant, turned**2 + normal, 1))
    # `significant` negates `<=`, so it is true for NaN: a NaN has to stay.
    return jnp.where(expand_trailing(significant, ndim), normalize(again, ndim), 0), gap, residual


def projected_direction(
    grad: Matrices,
    tangent: Callable[[Any], Any],
    norm: Norm,
    magnified: float | None = None,
    beyond: Callable[[Any], Any] | None = None,
) -> tuple[Matrices, Numbers, Numbers]:
    """Apply the duality map to the tangent part of each gradient.

    The result is steepest if the duality map keeps the tangent space: always for the Frobenius
    norm; for the spectral norm if the projection is `X -> P X Q` with orthogonal projections P and
    Q, because a polar factor has the row and column space of its matrix. A method of msign enlarges
    rounding errors outside these spaces; they are projected out again and give the residual. If
    the tangent part is only rounding errors, the direction is zero and the gap 1.

    Args:
      grad: gradients at any scale, in their original dtype, which sets their rounding error.
      tangent: the orthogonal projection onto the tangent space, for arrays of moderate size.
      norm: the norm of steps; the caller applies its scale.
      magnified: for other projections: factor by which they magnify rounding errors. They may
        stretch the polar factor beyond norm 1, so the direction is shortened, and the gap includes
        the loss.
      beyond: the orthogonal projection onto further, possibly tangent directions; the gap counts
        that part of the gradient as lost.

    Returns:
      `(direction, gap, residual)`: directions of norm at most 1 at unit scale, float32 or wider;
      a bound, rounding included, on the share of the optimum that each direction misses; and
      `||A - P A Q||_F / k` for the direction A before its projection, with k the smaller side.
    """
    scaled, _ = scale_to_unit_exponent(grad, 2)
    lost = frobenius_norm(beyond(scaled)) if beyond else 0
    if not isinstance(norm, Spectral):
        direction, gap, residual = euclidean_direction(grad, tangent, 2, magnified or 1.0)
        if beyond:
            value = inner_product(scaled, direction)
            share = value / nonzero_or_one(jnp.hypot(value, lost))
            gap = jnp.where(value == 0, gap, 1 - share + share * gap)
        return direction, gap, residual
    part = tangent(scaled)
    length, whole = frobenius_norm(part), frobenius_norm(scaled)
    unit, side = float(jnp.finfo(scaled.dtype).eps), min(grad.shape[-2:])
    unit = 2 * unit * magnified if magnified else unit
    significant = ~(length <= max(8 * unit, rounding_loss(grad.dtype)) * whole)
    sign = msign(part, norm.method)
    direction = tangent(sign)
    left = frobenius_norm(sign - direction)
    if magnified:
        most = jnp.minimum(jnp.maximum(spectral_bound(direction), 1), 1 + left)
        direction = direction / expand_trailing(most, 2)
    residual = left / max(side, 1)
    gained, missed = nuclear_parts(part, sign)
    # Bounds the nuclear norm of the rounding errors in the tangent part.
    noise = (side + 4) * unit * whole
    upper = gained + missed + math.sqrt(side) * lost + noise
    gap = relative_gap(upper, inner_product(part, direction) - noise)
    gap = jnp.where(whole == 0, 0, jnp.where(significant, gap, 1))
    residual = jnp.where(significant, residual, 0)
    return jnp.where(expand_trailing(significant, 2), direction, 0), gap, residual


def stay_if_still(point: Floats, vector: Floats, moved: Floats, ndim: int) -> Floats:
    """Return `moved`, but the unchanged `point` where the step `vector` is zero.

    A zero update must not move a point by rounding (some 1e-8), nor turn a point that cannot be
    normalised (all zeros) into NaN. A NaN in the step is not a zero.
    """
    # Not `all(vector == 0)`: on CPUs XLA compiles and runs it slower.
    length = jnp.sum(jnp.abs(vector), axis=trailing(vector, ndim), keepdims=True)
    return jnp.where(length == 0, point, moved.astype(point.dtype))


def bounded_step(vector: Floats, scale: float, longest: float, ndim: int) -> Floats:
    """Return `vector / scale` in float32 or wider, shortened to the length `longest`.

    The length is the Euclidean norm or, for matrices (`ndim=2`), a bound on the spectral norm if
    smaller. The bound takes row sums of the Gram matrix, which is formed only if the Euclidean norm
    of some step exceeds `longest`. A step that is not shortened keeps its bits.
    """
    step = upcast(vector) / scale
    if math.isinf(longest) or 0 in step.shape:
        return step

    def cut(step: Floats) -> Floats:
        most = jnp.max(jnp.abs(step), axis=trailing(step, ndim), keepdims=True)
        scaled = step / nonzero_or_one(most)
        size = frobenius_norm(scaled, ndim)
        if ndim == 2:
            high = tall(scaled)
            rows = largest_row_sum(product(high.mT, high))[..., 0, 0]
            size = jnp.minimum(size, jnp.sqrt(rows))
        size = expand_trailing(size, ndim)
        return jnp.where(size * most > longest, scaled * (longest / nonzero_or_one(size)), step)

    # Infinite where squares overflow.
    long = frobenius_norm(step, ndim) > longest
    return jax.lax.cond(jnp.any(long), cut, lambda step: step, step)


def without(unit: Floats, vector: Floats, ndim: int) -> Floats:
    """Return `v - u <u, v>` over the trailing `ndim` axes, for unit (or zero) `u`."""
    return vector - never_fused(unit * expand_trailing(inner_product(unit, vector, ndim), ndim))


def at_any_scale(projection: Callable[[Any], Any], vector: Floats, ndim: int) -> Floats:
    """Return `projection(vector)` of a homogeneous projection, without under- or overflow."""
    scaled, exponent = scale_to_unit_exponent(vector, ndim)
    return times_power_of_two(projection(scaled), exponent, ndim).astype(vector.dtype)


def never_fused(product: Floats) -> Floats:
    """Drop a bit of entrywise products before they are subtracted from vectors.

    XLA may compute a difference twice, for its length and for its entries, and fuse product and
    difference into a single rounding in only one case: a small difference would get two values.
    """
    info = jnp.finfo(product.dtype)
    return jax.lax.reduce_precision(product, info.nexp, info.nmant - 1)
