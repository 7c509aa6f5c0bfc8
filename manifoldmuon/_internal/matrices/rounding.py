"""Steps and tangent parts, guarded against rounding, underflow and overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.matrices.arrays import (
    Floats,
    expand_trailing,
    frobenius_norm,
    inner_product,
    nonzero_or_one,
    product,
    tall,
    trailing,
    upcast,
)
from manifoldmuon._internal.matrices.polar import largest_row_sum
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two


def noise_share(*dtypes: Any) -> float:
    """Return the largest tangent share of a gradient that counts as rounding of a normal gradient.

    Eight roundings of the arithmetic, which is float32 or wider, or one rounding of the gradient to
    the coarsest dtype. Give the dtype of the *point* in any case: a float32 average of bfloat16
    gradients keeps their noise.
    """
    eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    return max(8 * min(eps, float(jnp.finfo(jnp.float32).eps)), eps / 2)


def keep_if_zero(point: Floats, vector: Floats, new_point: Floats, ndim: int) -> Floats:
    """Return `new_point`, but the unchanged `point` where the step `vector` is zero.

    A zero update must not move a point by rounding (some 1e-8), nor turn a point that cannot be
    normalised (all zeros) into NaN. A NaN in the step is not a zero. Derivatives are those of
    `new_point`, also at a zero step.
    """
    # Not a sum of magnitudes, with which steps of `adamh` on CPUs take 6 to 12 % longer.
    moves = jnp.any(vector != 0, axis=trailing(vector, ndim), keepdims=True)
    return _choose(moves, new_point.astype(point.dtype), point)


@jax.custom_jvp
def _choose(moves: Bool[Array, "..."], new_point: Floats, point: Floats) -> Floats:
    return jnp.where(moves, new_point, point)


@_choose.defjvp
def _choose_jvp(primals, tangents):
    moves, new_point, _ = primals
    _, changed, given = tangents
    return _choose(*primals), jnp.where(moves | jnp.isfinite(new_point), changed, given)


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
    return vector - without_fma(unit * expand_trailing(inner_product(unit, vector, ndim), ndim))


def scale_invariant(projection: Callable[[Any], Any], vector: Floats, ndim: int) -> Floats:
    """Return `projection(vector)` of a homogeneous projection, without under- or overflow."""
    scaled, exponent = scale_to_unit_exponent(vector, ndim)
    return times_power_of_two(projection(scaled), exponent, ndim).astype(vector.dtype)


def without_fma(product: Floats) -> Floats:
    """Drop a bit of entrywise products before they are subtracted from vectors.

    XLA may compute a difference twice, for its length and for its entries, and fuse product and
    difference into a single rounding in only one case: a small difference would get two values.
    """
    info = jnp.finfo(product.dtype)
    return jax.lax.reduce_precision(product, info.nexp, info.nmant - 1)
