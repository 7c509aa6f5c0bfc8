"""Exact scaling by powers of two, denormal numbers included."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon._internal.meshes.mesh import match_varying_axes

_LIFT = 100  # power of two that makes denormal numbers normal

# For each dtype: integers of the same size, position of the exponent bits, bias of the exponent.
_LAYOUTS = {
    jnp.dtype(jnp.float32): (np.int32, 23, 127),
    jnp.dtype(jnp.float64): (np.int64, 52, 1023),
}


# Both functions have an inner `jit`: a direction calls them a dozen times, and each shape is traced
# once. Outside of jit they run as a single program.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1, inline=True)
def scale_to_unit_exponent(x: Floats, ndim: int) -> tuple[Floats, Int[Array, "..."]]:
    """Divide each block of `ndim` axes by the largest power of two up to its largest magnitude.

    Multiplying by a power of two is exact, so a function that is invariant to positive scale
    gives the same bits for `x` and for `2**k * x`. Denormal entries are read exactly, also on
    backends that flush them to zero.

    Returns:
      `(scaled, exponent)` with `x == scaled * 2**exponent`: `scaled` in float32 or wider, its
      largest magnitude in [1, 2); `exponent` with the leading axes' shape. A zero block stays
      zero; a block with a NaN or an infinity becomes NaN throughout, with exponent 0. The
      derivative treats the power of two as a constant.
    """
    y = arrays.upcast(x)
    integer, mantissa, bias = _LAYOUTS[y.dtype]
    most = _magnitude(y)
    if integer == np.int32:
        # XLA on CPUs takes maxima of float32 three times as fast as of integers. Without their last
        # eight bits, which do not affect the exponent, the integers are exact in float32.
        most = jnp.where(most < 1 << 24, most, most & ~0xFF).astype(jnp.float32)
    most = jnp.max(most, axis=arrays.trailing(x, ndim), initial=0).astype(integer)
    # XLA may flush denormal numbers to zero, but not their bits, which count the smallest number.
    tiny, finite = most < 1 << mantissa, most >> mantissa <= 2 * bias
    units = jax.lax.bitcast_convert_type(most.astype(y.dtype), integer)
    exponent = (jnp.where(tiny, units, most) >> mantissa) - bias
    exponent = jnp.where(tiny, exponent - (bias + mantissa - 1), exponent)
    exponent = jnp.where(finite & (most > 0), exponent, 0).astype(jnp.int32)
    visible = arrays.expand_trailing(jnp.where(finite, jnp.ones((), y.dtype), jnp.nan), ndim)
    return times_power_of_two(y, -exponent, ndim) * visible, exponent


@scale_to_unit_exponent.defjvp
def _scale_to_unit_exponent_jvp(ndim, primals, tangents):
    scaled, exponent = scale_to_unit_exponent(primals[0], ndim)
    tangent = _shifted(arrays.upcast(tangents[0]), -exponent, ndim)
    return (scaled, exponent), (tangent, jax.custom_derivatives.zero_from_primal(exponent))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2, inline=True)
def times_power_of_two(x: Floats, exponent: Int[Array, "..."], ndim: int = 0) -> Floats:
    """Return `x * 2**exponent`, with an exponent for each block of `ndim` trailing axes.

    Denormal entries are exact if the result is normal.
    """
    wide, raises = arrays.upcast(x), exponent > _LIFT
    wide = jnp.where(arrays.expand_trailing(raises, ndim), _raised(wide), wide)
    shifted = _shifted(wide, jnp.where(raises, exponent - _LIFT, exponent), ndim)
    return shifted.astype(x.dtype)


@times_power_of_two.defjvp
def _times_power_of_two_jvp(ndim, primals, tangents):
    # Needed for zeros, which are decoded from their bits like denormals: bits have no derivative.
    x, exponent = primals
    tangent = _shifted(arrays.upcast(tangents[0]), exponent, ndim).astype(x.dtype)
    return times_power_of_two(x, exponent, ndim), match_varying_axes(tangent, x)


def _shifted(x, exponent, ndim):
    half = exponent // 2  # 2**exponent itself may not be representable
    for part in (half, exponent - half):
        x = x * arrays.expand_trailing(_power_of_two(part, x.dtype), ndim)
    return x


def _power_of_two(exponent: Int[Array, "..."], dtype) -> Floats:
    """Return `2**exponent` by its bits: 0 below the normal numbers, above them the largest power.

    `jnp.ldexp` and `jnp.frexp` add forty operations each to every loop that XLA fuses them into.
    """
    integer, mantissa, bias = _LAYOUTS[jnp.dtype(dtype)]
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(integer)
    return jax.lax.bitcast_convert_type(field << mantissa, dtype)


def _magnitude(x: Floats) -> Int[Array, "..."]:
    """Return the bits of numbers without the sign: in the order of the magnitudes, NaN last."""
    integer, _, _ = _LAYOUTS[x.dtype]
    return jax.lax.bitcast_convert_type(x, integer) & np.iinfo(integer).max


def _raised(x: Floats) -> Floats:
    """Return `x * 2**_LIFT`, exact for denormal numbers, too."""
    integer, mantissa, bias = _LAYOUTS[x.dtype]
    bits = _magnitude(x)
    negative = jax.lax.bitcast_convert_type(x, integer) < 0
    units = jnp.where(negative, -bits, bits).astype(x.dtype)
    tiny = bits < 1 << mantissa
    return jnp.where(tiny, units * 2.0 ** (_LIFT - bias - mantissa + 1), x * 2.0**_LIFT)


def euclidean_norm(x: Floats, ndim: int) -> Floats:
    """Return the norm over the trailing `ndim` axes, at any scale, in float32 or wider."""
    scaled, exponent = scale_to_unit_exponent(x, ndim)
    return times_power_of_two(arrays.frobenius_norm(scaled, ndim), exponent)


def to_unit_norm(x: Floats, ndim: int) -> Floats:
    """Return `x / ||x||` over the trailing `ndim` axes, in float32 or wider; zero stays zero."""
    scaled, _ = scale_to_unit_exponent(x, ndim)
    length = arrays.expand_trailing(arrays.frobenius_norm(scaled, ndim), ndim)
    # A scaled block has length 0 or at least 1. A test `length > 0` would hide a NaN.
    return scaled / arrays.nonzero_or_one(length)
