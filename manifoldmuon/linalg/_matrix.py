"""Transposes, symmetric parts and products, for matrices in the trailing two axes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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


def upcast(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` in float32, or in its own dtype where that is wider."""
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
