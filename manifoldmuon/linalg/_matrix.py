"""What every layer computes with: parts of matrices, products, and powers of two.

Matrices lie in the trailing two axes; leading axes are independent.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, Shaped

Tree = TypeVar("Tree")


def mT(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch n m"]:
    """The transpose of each matrix."""
    return jnp.swapaxes(x, -1, -2)


def sym(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The symmetric part `(x + x^T) / 2`, exactly symmetric; halved first, against overflow."""
    half = x * 0.5
    return half + mT(half)


def skew(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """The skew-symmetric part `(x - x^T) / 2`, exactly skew."""
    half = x * 0.5
    return half - mT(half)


def tall(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch p q"]:
    """Each matrix, or its transpose, whichever has at least as many rows as columns."""
    return mT(x) if _is_wide(x) else x


def turned_like(
    x: Float[Array, "*batch p q"], example: Float[Array, "*batch m n"]
) -> Float[Array, "*batch m n"]:
    """The way back from `tall(example)`: each tall matrix, transposed where `example` is wide.

    What is wide already stays as it is.
    """
    return mT(x) if _is_wide(example) and x.shape[-2] > x.shape[-1] else x


def _is_wide(x: Float[Array, "*batch m n"]) -> bool:
    return x.shape[-2] < x.shape[-1]


def trailing(x: Float[Array, "..."], ndim: int) -> tuple[int, ...]:
    """The trailing `ndim` axes of `x`, as negative numbers.

    Raises:
      ValueError: `x` has fewer than `ndim` axes.
    """
    if x.ndim < ndim:
        raise ValueError(
            f"an array of shape {tuple(x.shape)} has {x.ndim} axes, but one weight takes the "
            f"trailing {ndim}; choose a norm or manifold made for {x.ndim} axes"
        )
    return tuple(range(-ndim, 0))


def over(numbers: Shaped[Array, "..."], ndim: int) -> Shaped[Array, "..."]:
    """One number for each weight, with `ndim` axes of length one behind: broadcast against it."""
    return jnp.expand_dims(numbers, tuple(range(-ndim, 0)))


def identity_like(x: Float[Array, "*batch n n"]) -> Float[Array, "*ones n n"]:
    """The identity for every matrix of `x`: as many axes, the leading ones of length one."""
    return jnp.expand_dims(jnp.eye(x.shape[-1], dtype=x.dtype), tuple(range(x.ndim - 2)))


def inner_product(
    x: Float[Array, "..."], y: Float[Array, "..."], ndim: int = 2
) -> Float[Array, "..."]:
    """`<x, y>` over the trailing `ndim` axes, in float32 or wider."""
    return jnp.sum(upcast(x) * upcast(y), axis=trailing(x, ndim))


def frobenius_norm(x: Float[Array, "..."], ndim: int = 2) -> Float[Array, "..."]:
    """The Euclidean length over the trailing `ndim` axes; squares must not over- or underflow."""
    return safe_sqrt(jnp.sum(x**2, axis=trailing(x, ndim)))


@jax.custom_jvp
def safe_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root; at zero it has a derivative, so that lengths of zero have derivative zero.

    That of `jnp.sqrt` is infinite there, and times zero NaN in reverse mode.

    Args:
      x: not negative; NaN otherwise.
    """
    return jnp.sqrt(x)


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    root = safe_sqrt(*primals)
    return root, tangents[0] / (2 * one_for_zero(root))


def upcast(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32, or in its own dtype where that is wider.

    Raises:
      TypeError: `x` is complex. Everything here passes it through this function.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"got {x.dtype}; only real numbers are known here. Keep the real and the imaginary part"
            " as two parameters, as optax.contrib.split_real_and_imaginary does"
        )
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def product(
    left: Float[Array, "*#batch m k"],
    right: Float[Array, "*#batch k n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
    operands=None,
) -> Float[Array, "... m n"]:
    """`left @ right`, summed in float32 or wider.

    Args:
      left: the left factor.
      right: the right factor.
      precision: accelerators round float32 operands to fewer bits unless told `HIGHEST`.
      operands: a dtype to which both factors are rounded first (`jnp.bfloat16` is an
        accelerator's fast path), or None for no rounding.

    Returns:
      The product, in the wider of float32 and the factors' own dtype.
    """
    out = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    if operands is not None:
        left, right = left.astype(operands), right.astype(operands)
    return jnp.matmul(left, right, precision=precision, preferred_element_type=out).astype(out)


def one_for_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, with 1 in place of 0: a divisor."""
    return jnp.where(x == 0, 1, x)


def varying_alike(tree: Tree, *others: Any) -> Tree:
    """`tree`, each array varying over every axis of a mesh over which any array given varies.

    Inside of `jax.shard_map` a loop has to begin with arrays that vary over the same axes as those
    that it goes on with. Elsewhere the tree comes back as it is.

    Args:
      tree: a pytree of arrays, to be carried by one loop.
      others: pytrees of arrays that go into the loop on its way.
    """
    if not inside_shard_map():
        return tree
    # By what stands in all versions of JAX: a choice varies as what it is made by. XLA removes it.
    unset = [jnp.zeros_like(x, bool, shape=()) for x in jax.tree.leaves((tree, others))]
    either = functools.reduce(jnp.logical_or, unset, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jax.lax.select(either, jnp.asarray(x), jnp.asarray(x)), tree)


def inside_shard_map() -> bool:
    """Whether this is traced inside of `jax.shard_map`, where every device holds its own arrays."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def overlap(
    x: Float[Array, "*batch m n"],
    y: Float[Array, "*batch m n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch k k"]:
    """`X^T Y` of tall or square matrices; of wide ones, which stand for their transposes, `X Y^T`.

    With `combine` an algorithm for tall matrices takes wide ones as they lie in memory: on a CPU a
    transpose takes as long as a third of a product with a square of the shorter side, at 256.
    """
    return product(x, mT(y), precision) if _is_wide(x) else product(mT(x), y, precision)


def combine(
    x: Float[Array, "*batch m n"],
    weights: Float[Array, "*batch k k"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch m n"]:
    """`X S` of a tall or square matrix; of a wide one, which stands for its transpose, `S^T X`."""
    return product(mT(weights), x, precision) if _is_wide(x) else product(x, weights, precision)


def check_precision(name: str, precision: object) -> None:
    """Raises `TypeError`, naming the argument, for what is not a `jax.lax.Precision`."""
    if not isinstance(precision, jax.lax.Precision):
        raise TypeError(
            f"{name} must be a jax.lax.Precision such as Precision.HIGHEST; got {precision!r}"
        )


def rounding(precision: jax.lax.Precision, dtype) -> float:
    """What accelerators round factors of this dtype to, as `finfo.eps` counts it.

    Float32 factors become a bfloat16 number, or the sum of two: 8 bits each, and a sign between.
    """
    own = float(jnp.finfo(dtype).eps)
    rounded = {jax.lax.Precision.DEFAULT: 2.0**-7, jax.lax.Precision.HIGH: 2.0**-16}
    return rounded.get(precision, own) if dtype == jnp.float32 else own


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
def prescale(x: Float[Array, "..."], ndim: int) -> tuple[Float[Array, "..."], Int[Array, "..."]]:
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
    exponent, finite = _exponent(y, trailing(x, ndim))
    visible = over(jnp.where(finite, jnp.ones((), y.dtype), jnp.nan), ndim)
    return times_power_of_two(y, -exponent, ndim) * visible, exponent


@prescale.defjvp
def _prescale_jvp(ndim, primals, tangents):
    scaled, exponent = prescale(primals[0], ndim)
    tangent = _shifted(upcast(tangents[0]), -exponent, ndim)
    return (scaled, exponent), (tangent, jax.custom_derivatives.zero_from_primal(exponent))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2, inline=True)
def times_power_of_two(
    x: Float[Array, "..."], exponent: Int[Array, "..."], ndim: int = 0
) -> Float[Array, "..."]:
    """`x * 2**exponent`, with one exponent for each block of `ndim` trailing axes.

    Denormal entries are read exactly where they become normal numbers.
    """
    wide, raises = upcast(x), exponent > _LIFT
    wide = jnp.where(over(raises, ndim), _raised(wide), wide)
    moved = _shifted(wide, jnp.where(raises, exponent - _LIFT, exponent), ndim)
    return moved.astype(x.dtype)


@times_power_of_two.defjvp
def _times_power_of_two_jvp(ndim, primals, tangents):
    # By its rule: the bits of a zero, which is read like a denormal number, have no derivative.
    x, exponent = primals
    tangent = _shifted(upcast(tangents[0]), exponent, ndim).astype(x.dtype)
    return times_power_of_two(x, exponent, ndim), varying_alike(tangent, x)


def _shifted(x, exponent, ndim):
    half = exponent // 2  # 2**exponent itself may not be representable
    for part in (half, exponent - half):
        x = x * over(_power_of_two(part, x.dtype), ndim)
    return x


def _power_of_two(exponent: Int[Array, "..."], dtype) -> Float[Array, "..."]:
    """`2**exponent` by its bits: 0 below the normal numbers, above them the largest power.

    `jnp.ldexp` and `jnp.frexp` are forty operations each, in every loop that XLA fuses them into.
    """
    integer, places, bias = _LAYOUTS[jnp.dtype(dtype)]
    field = jnp.clip(exponent + bias, 0, 2 * bias).astype(integer)
    return jax.lax.bitcast_convert_type(field << places, dtype)


def _exponent(x: Float[Array, "..."], axes: tuple[int, ...]):
    """The binary exponent of the largest magnitude of each block, 0 for none, and if it is finite.

    XLA may flush denormal numbers to zero. Their bits, which count units of the smallest, are safe.
    """
    integer, places, bias = _LAYOUTS[x.dtype]
    most = jnp.max(_magnitude(x), axis=axes, initial=0)
    tiny = most < 1 << places
    units = jax.lax.bitcast_convert_type(most.astype(x.dtype), integer)
    exponent = (jnp.where(tiny, units, most) >> places) - bias
    exponent = jnp.where(tiny, exponent - (bias + places - 1), exponent)
    finite = most >> places <= 2 * bias
    return jnp.where(finite & (most > 0), exponent, 0).astype(jnp.int32), finite


def _magnitude(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """The bits of numbers but their sign: ordered as the magnitudes are, NaN last."""
    integer, _, _ = _LAYOUTS[x.dtype]
    return jax.lax.bitcast_convert_type(x, integer) & np.iinfo(integer).max


def _raised(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * 2**_LIFT`, of denormal numbers too."""
    integer, places, bias = _LAYOUTS[x.dtype]
    bits = _magnitude(x)
    negative = jax.lax.bitcast_convert_type(x, integer) < 0
    units = jnp.where(negative, -bits, bits).astype(x.dtype)
    tiny = bits < 1 << places
    return jnp.where(tiny, units * 2.0 ** (_LIFT - bias - places + 1), x * 2.0**_LIFT)


def normalize(x: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """`x / ||x||` over the trailing `ndim` axes, in float32 or wider; zero stays zero."""
    scaled, _ = prescale(x, ndim)
    length = over(frobenius_norm(scaled, ndim), ndim)
    # A prescaled weight has length 0 or at least 1. Not `> 0`: that would hide a NaN.
    return scaled / one_for_zero(length)
