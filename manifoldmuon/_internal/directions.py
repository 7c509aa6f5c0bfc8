"""Steepest directions by projection onto a tangent space, and what rounding asks of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arrays import (
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
from manifoldmuon._internal.polar import largest_row_sum
from manifoldmuon._internal.powers_of_two import (
    normalize,
    scale_to_unit_exponent,
    times_power_of_two,
)
from manifoldmuon._internal.spectral import nuclear_parts, spectral_bound
from manifoldmuon.linalg import msign
from manifoldmuon.norms import Norm, Spectral


def euclidean_direction(
    grad: Floats, tangent: Callable[[Any], Any], ndim: int, magnified: float = 1.0
) -> tuple[Floats, Floats, Floats]:
    """The direction of the tangent part of each gradient: steepest in the Euclidean norm.

    A gradient that is normal to the set has a tangent part made of rounding errors alone; dividing
    it by its own length would turn noise into a full step. Below a few units of rounding, relative
    to the gradient, the direction is therefore zero.

    Args:
      grad: gradients at any scale, in their own dtype: it says what they are rounded to.
      tangent: the orthogonal projection onto the tangent space, of arrays of moderate size.
      ndim: how many trailing axes make one gradient.
      magnified: by what the projection magnifies rounding errors.

    Returns:
      `(direction, gap, residual)`: unit or zero arrays, float32 or wider; the gap of each, with
      what rounding may have turned it by; and how much of it, before a second projection, was
      normal.
    """
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    part = tangent(scaled)
    length, whole = frobenius_norm(part, ndim), frobenius_norm(scaled, ndim)
    unit = float(jnp.finfo(scaled.dtype).eps)
    noise, loss = 8 * magnified * unit * whole, rounding_loss(grad.dtype)
    significant = ~(length <= jnp.maximum(noise, loss * whole))
    # Once more: where the tangent part is small, the first pass left relatively much behind.
    direction = normalize(part, ndim)
    again = tangent(direction)
    residual = jnp.where(significant, frobenius_norm(direction - again, ndim), 0)
    turned = noise / nonzero_or_one(length)
    # What rounding leaves of the normal part costs the more, the more of the gradient is normal.
    normal = jnp.maximum(4 * unit, turned / 4) + loss * (whole / nonzero_or_one(length) - 1)
    gap = jnp.where(whole == 0, 0, jnp.where(significant, turned**2 + normal, 1))
    # Not where the length is above the noise: a NaN has to stay.
    return jnp.where(expand_trailing(significant, ndim), normalize(again, ndim), 0), gap, residual


def projected_direction(
    grad: Matrices,
    tangent: Callable[[Any], Any],
    norm: Norm,
    magnified: float | None = None,
    beyond: Callable[[Any], Any] | None = None,
) -> tuple[Matrices, Numbers, Numbers]:
    """The duality map of the tangent part of each gradient.

    It is steepest where that map leaves the tangent space as it is. For the Frobenius norm this
    holds always, for the spectral norm where the projection is `X -> P X Q` with orthogonal
    projections P and Q: the polar factor has the row and column space of its matrix. What a method
    of msign makes of rounding errors outside of them is projected out again, and is the residual.
    Where the tangent part is nothing but rounding the direction is zero and the gap 1.

    Args:
      grad: gradients at any scale, in their own dtype: it says what they are rounded to.
      tangent: the orthogonal projection onto the tangent space, of arrays of moderate size.
      norm: the norm of steps, whose scale is left to the caller.
      magnified: for other projections, which may make the polar factor longer than 1: by what
        their rounding errors are magnified. The gap then says what the direction misses.
      beyond: the orthogonal projection onto what may be tangent as well; the gap counts it as lost.

    Returns:
      `(direction, gap, residual)`: directions of norm at most 1 at unit scale, float32 or wider;
      a bound, rounding included, on the share of the optimum that each misses; and
      `||A - P A Q||_F / k` of the raw direction A, with k the smaller side.
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
    # The nuclear norm of what rounding may have done to the tangent part.
    noise = (side + 4) * unit * whole
    upper = gained + missed + math.sqrt(side) * lost + noise
    gap = relative_gap(upper, inner_product(part, direction) - noise)
    gap = jnp.where(whole == 0, 0, jnp.where(significant, gap, 1))
    residual = jnp.where(significant, residual, 0)
    return jnp.where(expand_trailing(significant, 2), direction, 0), gap, residual


def stay_if_still(point: Floats, vector: Floats, moved: Floats, ndim: int) -> Floats:
    """`moved`, except that a point whose step is zero is returned untouched.

    Rounding would move it by some 1e-8, and a point that cannot be normalised (all zeros) would
    become NaN: a zero update must leave both alone. A NaN in the step is not a zero.
    """
    # Not `all(vector == 0)`, which XLA on CPUs compiles and computes slower.
    length = jnp.sum(jnp.abs(vector), axis=trailing(vector, ndim), keepdims=True)
    return jnp.where(length == 0, point, moved.astype(point.dtype))


def bounded_step(vector: Floats, scale: float, longest: float, ndim: int) -> Floats:
    """Return `vector / scale` in float32 or wider, cut to the length `longest`.

    The length is the Euclidean norm; for matrices a bound of the spectral norm where that is
    smaller, from the row sums of the Gram matrix, which a step of ordinary length does not pay for.
    A step that is not cut keeps its bits.
    """
    step = upcast(vector) / scale
    if math.isinf(longest) or 0 in step.shape:
        return step

    def cut(step: Floats) -> Floats:
        scaled, exponent = scale_to_unit_exponent(step, ndim)
        size = expand_trailing(frobenius_norm(scaled, ndim), ndim)
        if ndim == 2:
            high = tall(scaled)
            size = jnp.minimum(size, jnp.sqrt(largest_row_sum(product(high.mT, high))))
        size = nonzero_or_one(size)  # its square is at least 1, or 0
        most = times_power_of_two(longest / size, -expand_trailing(exponent, ndim))
        return jnp.where(most < 1, scaled * (longest / size), step)

    # Where squares overflow this is infinite, and cut.
    long = frobenius_norm(step, ndim) > longest
    return jax.lax.cond(jnp.any(long), cut, lambda step: step, step)


def without(unit: Floats, vector: Floats, ndim: int) -> Floats:
    """Return `v - u <u, v>` over the trailing `ndim` axes, for unit (or zero) `u`."""
    return vector - never_fused(unit * expand_trailing(inner_product(unit, vector, ndim), ndim))


def at_any_scale(projection: Callable[[Any], Any], vector: Floats, ndim: int) -> Floats:
    """Return `projection(vector)`, which scales with the vector, without under- or overflow."""
    scaled, exponent = scale_to_unit_exponent(vector, ndim)
    return times_power_of_two(projection(scaled), exponent, ndim).astype(vector.dtype)


def never_fused(product: Floats) -> Floats:
    """Entry by entry products, rounded a bit further: what is subtracted from vectors.

    XLA may compute a difference once for its length and again for its entries, and fuse product and
    difference into one rounding in one of them only: a small difference would be two vectors.
    """
    info = jnp.finfo(product.dtype)
    return jax.lax.reduce_precision(product, info.nexp, info.nmant - 1)
