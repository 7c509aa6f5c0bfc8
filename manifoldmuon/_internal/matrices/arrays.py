"""Parts, products and norms of matrices.

Matrices are the trailing two axes; leading axes are independent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

# Types of arrays. Leading axes are independent copies; within a call, a letter stands for one size.
Floats = Float[Array, "..."]
Matrices = Float[Array, "*batch m n"]
Tall = Float[Array, "*batch p q"]  # Matrices, transposed if wide
Vectors = Float[Array, "*batch n"]
Squares = Float[Array, "*batch n n"]
Numbers = Float[Array, "*batch"]  # a number for each copy


def sym(x: Squares) -> Squares:
    """Return `(x + x^T) / 2`, exactly symmetric; halving first prevents overflow."""
    half = x * 0.5
    return half + half.mT


def skew(x: Squares) -> Squares:
    """Return `(x - x^T) / 2`, exactly skew-symmetric."""
    half = x * 0.5
    return half - half.mT


def tall(x: Matrices) -> Tall:
    """Return each matrix, transposed if it is wide."""
    return x.mT if x.shape[-2] < x.shape[-1] else x


def match_orientation(x: Tall, example: Matrices) -> Matrices:
    """Undo `tall(example)`: transpose tall matrices if `example` is wide; keep wide matrices."""
    return x.mT if example.shape[-2] < example.shape[-1] and x.shape[-2] > x.shape[-1] else x


def trailing(x: Floats, ndim: int) -> tuple[int, ...]:
    """Return the trailing `ndim` axes, as negative numbers; raise `ValueError` if `x` has fewer."""
    if x.ndim < ndim:
        raise ValueError(
            f"expected at least {ndim} axes; got the shape {tuple(x.shape)}. Choose a norm or "
            f"manifold for {x.ndim} axes"
        )
    return tuple(range(-ndim, 0))


def expand_trailing(numbers: Shaped[Array, "..."], ndim: int) -> Shaped[Array, "..."]:
    """Append `ndim` axes of length 1 to a number per weight, to broadcast against the weights."""
    return jnp.expand_dims(numbers, tuple(range(-ndim, 0)))


def identity_like(x: Squares) -> Float[Array, "*ones n n"]:
    """Return the identity with as many axes as `x`; leading axes have length 1."""
    return jnp.expand_dims(jnp.eye(x.shape[-1], dtype=x.dtype), tuple(range(x.ndim - 2)))


def inner_product(x: Floats, y: Floats, ndim: int = 2) -> Floats:
    """Return `<x, y>` over the trailing `ndim` axes, in float32 or wider."""
    return jnp.sum(upcast(x) * upcast(y), axis=trailing(x, ndim))


def frobenius_norm(x: Floats, ndim: int = 2) -> Floats:
    """Return the Euclidean norm over `ndim` trailing axes; squares must not over- or underflow."""
    return safe_sqrt(jnp.sum(x**2, axis=trailing(x, ndim)))


def largest(x: Floats, axis: int | tuple[int, ...] | None = None, *, keepdims=False) -> Floats:
    """Return the maximum of numbers from 0 on, or NaN if any is NaN.

    XLA on CPUs (jaxlib 0.10 to 0.12) drops NaNs from 4096 numbers on, along any axis.
    """
    value = jnp.max(x, axis=axis, initial=0, keepdims=keepdims)
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis, keepdims=keepdims), jnp.nan, value)


@jax.custom_jvp
def safe_sqrt(x: Floats) -> Floats:
    """Return the square root, with a finite derivative at zero: zero vectors get norm gradient 0.

    The derivative of `jnp.sqrt` is infinite at zero, and becomes NaN (infinity times zero) in
    reverse mode.
    """
    return jnp.sqrt(x)


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    root = safe_sqrt(*primals)
    return root, tangents[0] / (2 * nonzero_or_one(root))


def upcast(x: Floats) -> Floats:
    """Return `x` in float32, or in its own dtype if wider; see also `check_floating`.

    All arrays of the package pass through this function.
    """
    check_floating(x.dtype)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def check_square(name: str, x: Any) -> None:
    """Raise `ValueError`, naming the argument, unless the trailing two axes are of one length."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name} takes square matrices in the trailing axes; got {x.shape}")


def check_floating(dtype: Any) -> None:
    """Raise `TypeError` for the dtype of complex numbers, integers or truth values."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"complex numbers are not supported; got {dtype}. Keep real and imaginary part as two"
            " parameters, as optax.contrib.split_real_and_imaginary does"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"expected floating-point numbers; got {dtype}, to which results would be rounded:"
            " write x.astype(jnp.float32)"
        )


def product(
    left: Float[Array, "*#batch m k"],
    right: Float[Array, "*#batch k n"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
    operands=None,
) -> Float[Array, "... m n"]:
    """Return `left @ right` in the wider of float32 and the factors' own dtype.

    Accelerators round float32 factors to fewer bits unless the precision is `HIGHEST`. `operands`
    is a dtype to round both factors to first, such as `jnp.bfloat16`, or None.
    """
    out = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    if operands is not None:
        left, right = left.astype(operands), right.astype(operands)
    return jnp.matmul(left, right, precision=precision, preferred_element_type=out).astype(out)


def trace(x: Squares) -> Numbers:
    """Return the trace."""
    return jnp.trace(x, axis1=-2, axis2=-1)


def nonzero_or_one(x: Floats) -> Floats:
    """Return `x` with 1 in place of 0, as a divisor."""
    return jnp.where(x == 0, 1, x)


def relative_gap(upper: Numbers, value: Numbers) -> Numbers:
    """Return `(upper - value) / upper`, or 0 where `upper` is 0 (zero is then optimal)."""
    missed = jnp.where(upper == 0, 0, jnp.maximum(upper - value, 0))
    # Divide last: XLA then computes the quotient once, not again for every leaf of a stack.
    return missed / nonzero_or_one(upper)


def gram_matrix(
    x: Matrices, y: Matrices, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> Float[Array, "*batch k k"]:
    """Return `X^T Y`, or `X Y^T` for wide matrices, which stand for their transposes.

    With this function and `right_multiply`, an algorithm for tall matrices takes wide matrices
    without a transpose. On a CPU the transpose costs a third of a product with a square matrix of
    the shorter side, at 256.
    """
    return product(x, y.mT, precision) if x.shape[-2] < x.shape[-1] else product(x.mT, y, precision)


def right_multiply(
    x: Matrices,
    weights: Float[Array, "*batch k k"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Matrices:
    """Return `X S`, or `S^T X` for wide matrices, which stand for their transposes."""
    wide = x.shape[-2] < x.shape[-1]
    return product(weights.mT, x, precision) if wide else product(x, weights, precision)


def check_precision(name: str, precision: object) -> None:
    """Raise `TypeError`, naming the argument, unless it is a `jax.lax.Precision`."""
    if not isinstance(precision, jax.lax.Precision):
        raise TypeError(
            f"{name} must be a jax.lax.Precision such as Precision.HIGHEST; got {precision!r}"
        )


def product_eps(precision: jax.lax.Precision, dtype) -> float:
    """Return the relative rounding of factors of this dtype on accelerators, like `finfo.eps`.

    `DEFAULT` rounds float32 factors to a bfloat16 number (8 bits), `HIGH` to the sum of two (17
    bits: 8 each, and the sign of the second number).
    """
    own = float(jnp.finfo(dtype).eps)
    rounded = {jax.lax.Precision.DEFAULT: 2.0**-7, jax.lax.Precision.HIGH: 2.0**-16}
    return rounded.get(precision, own) if dtype == jnp.float32 else own


def is_short(dtype) -> bool:
    """Return whether a dtype has fewer digits than float32, which the arithmetic has at least."""
    return bool(jnp.finfo(dtype).eps > jnp.finfo(jnp.float32).eps)
