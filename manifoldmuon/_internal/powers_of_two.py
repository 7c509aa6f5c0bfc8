"""Exact scaling by powers of two, denormal numbers included."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from manifoldmuon._internal.arrays import (
    Floats,
    expand_trailing,
    frobenius_norm,
    nonzero_or_one,
    trailing,
    upcast,
)
from manifoldmuon._internal.mesh import match_varying_axes

_LIFT = 100  # binary places by which numbers are raised that may be denormal


# The integers of the same size, where in them the exponent begins, and from where it counts.
_LAYOUTS = {
    jnp.dtype(jnp.float32): (np.int32, 23, 127),
    jnp.dtype(jnp.float64): (np.int64, 52, 1023),
}


# `jit` inside of both: a direction asks a dozen times, and each shape is traced once. Outside of
# jit they are one program.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@functools.partial(jax.jit, static_argnums=1, inline=True)
def scale_to_unit_exponent(x: Floats, ndim: int) -> tuple[Floats, Int[Array, "..."]]:
    """Divides each block by the power of two nearest below its largest magnitude.

    Multiplying by a power of two is exact, so a function that is invariant to positive scale
    gives the same bits for `x` and for `2**k * x`. Denormal entries are read exactly, also on
    backends that flush them to zero.

    Args:
      x: blocks in the trailing `ndim` axes; leading axes are independent.
      ndim: how many trailing axes make one block.

    Returns:
      `(scaled, exponent)` with `x == scaled * 2**exponent`: `scaled` in float32 or wider, its
      largest magnitude in [1, 2); `exponent` with the leading axes' shape. A zero block stays
      zero; a block that holds a NaN or an infinity becomes NaN throughout, exponent 0.
      Differentiable, as multiplication by a constant.

    Raises:
      ValueError: `x` has fewer than `ndim` axes.
    """
    y = upcast(x)
    integer, places, bias = _LAYOUTS[y.dtype]
    most = _magnitude(y)
    if integer == np.int32:
        # XLA on CPUs finds the maximum of float32 numbers three times as fast: without the last
        # eight bits, which say nothing of the exponent, these are exact.
        most = jnp.where(most < 1 << 24, most, most & ~0xFF).astype(jnp.float32)
    most = jnp.max(most, axis=trailing(x, ndim), initial=0).astype(integer)
    # XLA may flush denormal numbers to zero. Their bits, which count units of the smallest, are
    # safe.
    tiny, finite = most < 1 << places, most >> places <= 2 * bias
    units = jax.lax.bitcast_convert_type(most.astype(y.dtype), integer)
    exponent = (jnp.where(tiny, units, most) >> places) - bias
    exponent = jnp.where(tiny, exponent - (bias + places - 1), exponent)
    exponent = jnp.where(finite & (most > 0), exponent, 0).astype(jnp.int32)
    visible = expand_trailing(jnp.where(finite, jnp.ones((), y.dtype), jnp.nan), ndim)
    return times_power_of_two(y, -exponent, ndim) * visible, exponent


@scale_to_unit_exponent.defjvp
def _scale_to_unit_exponent_jvp(ndim, primals, tangents):
    scaled, exponent = scale_to_unit_exponent(primals[0], ndim)
    tangent = _shifted(upcast(tangents[0]), -exponent, ndim)
    return (scaled, exponent), (tangent, jax.custom_derivatives.zero_from_primal(exponent))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2, inline=True)
def times_power_of_two(x: Floats, exponent: Int[Array, "..."], ndim: int = 0) -> Floats:
    """`x * 2**exponent`, with one exponent for each block of `ndim` trailing axes.

    Denormal entries are read exactly where they become normal numbers.
    """
    wide, raises = upcast(x), exponent > _LIFT
    wide = jnp.where(expand_trailing(raises, ndim), _raised(wide), wide)
    moved = _shifted(wide, jnp.where(raises, exponent - _LIFT, exponent), ndim)
    return moved.astype(x.dtype)


@times_power_of_two.defjvp
def _times_power_of_two_jvp(ndim, primals, tangents):
    # By its rule: the bits of a zero, which is read like a denormal number, have no derivative.
    x, exponent = primals
    tangent = _shifted(upcast(tangents[0]), exponent, ndim).astype(x.dtype)
    return times_power_of_two(x, exponent, ndim), match_varying_axes(tangent, x)


def _shifted(x, exponent, ndim):
    half = exponent // 2  # 2**exponent itself may not be representable
    for part in (half, exponent - half):
        x = x * expand_trailing(_power_of_two(part, x.dtype), ndim)
    return x


def _power_of_two(exponent: Int[Array, "..."], dtype) -> Floats:
    """`2**exponent` by its bits: 0 below the normal numbers, above them the largest power.

    `jnp.ldexp` and `jnp.frexp` are forty operations each, in every loop that XLA fuses them into.
    """
    integer, places, bias = _LAYOUTS[jnp.dtype(dtype)]
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(integer)
    return jax.lax.bitcast_convert_type(field << places, dtype)


def _magnitude(x: Floats) -> Int[Array, "..."]:
    """The bits of numbers but their sign: ordered as the magnitudes are, NaN last."""
    integer, _, _ = _LAYOUTS[x.dtype]
    return jax.lax.bitcast_convert_type(x, integer) & np.iinfo(integer).max


def _raised(x: Floats) -> Floats:
    """`x * 2**_LIFT`, of denormal numbers too."""
    integer, places, bias = _LAYOUTS[x.dtype]
    bits = _magnitude(x)
    negative = jax.lax.bitcast_convert_type(x, integer) < 0
    units = jnp.where(negative, -bits, bits).astype(x.dtype)
    tiny = bits < 1 << places
    return jnp.where(tiny, units * 2.0 ** (_LIFT - bias - places + 1), x * 2.0**_LIFT)


def normalize(x: Floats, ndim: int) -> Floats:
    """`x / ||x||` over the trailing `ndim` axes, in float32 or wider; zero stays zero."""
    scaled, _ = scale_to_unit_exponent(x, ndim)
    length = expand_trailing(frobenius_norm(scaled, ndim), ndim)
    # A prescaled weight has length 0 or at least 1. Not `> 0`: that would hide a NaN.
    return scaled / nonzero_or_one(length)
