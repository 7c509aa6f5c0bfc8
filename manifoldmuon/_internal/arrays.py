"""Parts, products and lengths of matrices and stacks of them.

Matrices are the trailing two axes; leading axes are independent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

# Types of arrays. Leading axes are independent copies; in a call one letter is one size.
Floats = Float[Array, "..."]
Matrices = Float[Array, "*batch m n"]
Tall = Float[Array, "*batch p q"]  # ... or wide ones, transposed
Vectors = Float[Array, "*batch n"]
Squares = Float[Array, "*batch n n"]
Numbers = Float[Array, "*batch"]  # one for each copy


def sym(x: Squares) -> Squares:
    """The symmetric part `(x + x^T) / 2`, exactly symmetric; halved first, against overflow."""
    half = x * 0.5
    return half + half.mT


def skew(x: Squares) -> Squares:
    """The skew-symmetric part `(x - x^T) / 2`, exactly skew."""
    half = x * 0.5
    return half - half.mT


def tall(x: Matrices) -> Tall:
    """Each matrix, or its transpose, whichever has at least as many rows as columns."""
    return x.mT if x.shape[-2] < x.shape[-1] else x


def match_orientation(x: Tall, example: Matrices) -> Matrices:
    """The way back from `tall(example)`: each tall matrix, transposed where `example` is wide.

    What is wide already stays as it is.
    """
    return x.mT if example.shape[-2] < example.shape[-1] and x.shape[-2] > x.shape[-1] else x


def trailing(x: Floats, ndim: int) -> tuple[int, ...]:
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


def expand_trailing(numbers: Shaped[Array, "..."], ndim: int) -> Shaped[Array, "..."]:
    """One number for each weight, with `ndim` axes of length one behind: broadcast against it."""
    return jnp.expand_dims(numbers, tuple(range(-ndim, 0)))


def identity_like(x: Squares) -> Float[Array, "*ones n n"]:
    """The identity for every matrix of `x`: as many axes, the leading ones of length one."""
    return jnp.expand_dims(jnp.eye(x.shape[-1], dtype=x.dtype), tuple(range(x.ndim - 2)))


def inner_product(x: Floats, y: Floats, ndim: int = 2) -> Floats:
    """`<x, y>` over the trailing `ndim` axes, in float32 or wider."""
    return jnp.sum(upcast(x) * upcast(y), axis=trailing(x, ndim))


def frobenius_norm(x: Floats, ndim: int = 2) -> Floats:
    """The Euclidean length over the trailing `ndim` axes; squares must not over- or underflow."""
    return safe_sqrt(jnp.sum(x**2, axis=trailing(x, ndim)))


def largest(
    x: Floats, axis: int | tuple[int, ...] | None = None, *, initial: float = 0, keepdims=False
) -> Floats:
    """`jnp.max`, and NaN where one is among the numbers.

    XLA on CPUs (jaxlib 0.10 to 0.12) loses the NaNs of 4096 numbers and more, along any axis.
    """
    found = jnp.max(x, axis=axis, initial=initial, keepdims=keepdims)
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis, keepdims=keepdims), jnp.nan, found)


@jax.custom_jvp
def safe_sqrt(x: Floats) -> Floats:
    """The square root; at zero it has a derivative, so that lengths of zero have derivative zero.

    That of `jnp.sqrt` is infinite there, and times zero NaN in reverse mode.

    Args:
      x: not negative; NaN otherwise.
    """
    return jnp.sqrt(x)


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals, tangents):
    root = safe_sqrt(*primals)
    return root, tangents[0] / (2 * nonzero_or_one(root))


def upcast(x: Floats) -> Floats:
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
      precision: accelerators round float32 operands to fewer bits unless it is `HIGHEST`.
      operands: a dtype to which both factors are rounded first (`jnp.bfloat16` is an
        accelerator's fast path), or None for no rounding.

    Returns:
      The product, in the wider of float32 and the factors' own dtype.
    """
    out = jnp.promote_types(jnp.promote_types(left.dtype, right.dtype), jnp.float32)
    if operands is not None:
        left, right = left.astype(operands), right.astype(operands)
    return jnp.matmul(left, right, precision=precision, preferred_element_type=out).astype(out)


def nonzero_or_one(x: Floats) -> Floats:
    """x, with 1 in place of 0: a divisor."""
    return jnp.where(x == 0, 1, x)


def relative_gap(upper: Numbers, value: Numbers) -> Numbers:
    """Return `(upper - value) / upper`, and 0 where the upper bound is 0: zero is optimal then."""
    missed = jnp.where(upper == 0, 0, jnp.maximum(upper - value, 0))
    # The quotient comes last: XLA computes it once, and not again for each leaf of a stack.
    return missed / nonzero_or_one(upper)


def gram_matrix(
    x: Matrices, y: Matrices, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> Float[Array, "*batch k k"]:
    """`X^T Y` of tall or square matrices; of wide ones, which stand for their transposes, `X Y^T`.

    With `right_multiply` an algorithm for tall matrices takes wide ones as they lie in memory: on
    a CPU a transpose takes as long as a third of a product with a square of the shorter side, at
    256.
    """
    return product(x, y.mT, precision) if x.shape[-2] < x.shape[-1] else product(x.mT, y, precision)


def right_multiply(
    x: Matrices,
    weights: Float[Array, "*batch k k"],
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Matrices:
    """`X S` of a tall or square matrix; of a wide one, which stands for its transpose, `S^T X`."""
    return (
        product(weights.mT, x, precision)
        if x.shape[-2] < x.shape[-1]
        else product(x, weights, precision)
    )


def check_precision(name: str, precision: object) -> None:
    """Raises `TypeError`, naming the argument, for what is not a `jax.lax.Precision`."""
    if not isinstance(precision, jax.lax.Precision):
        raise TypeError(
            f"{name} must be a jax.lax.Precision such as Precision.HIGHEST; got {precision!r}"
        )


def rounding(precision: jax.lax.Precision, dtype) -> float:
    """Return the relative rounding of factors of this dtype on accelerators, as `finfo.eps`.

    Float32 factors become a bfloat16 number, or the sum of two: 8 bits each, and a sign between.
    """
    own = float(jnp.finfo(dtype).eps)
    rounded = {jax.lax.Precision.DEFAULT: 2.0**-7, jax.lax.Precision.HIGH: 2.0**-16}
    return rounded.get(precision, own) if dtype == jnp.float32 else own


def rounding_loss(dtype) -> float:
    """Return what rounding to this dtype costs a direction, relatively; 0 for float32."""
    eps = float(jnp.finfo(dtype).eps)
    return eps / 2 if eps > jnp.finfo(jnp.float32).eps else 0.0
