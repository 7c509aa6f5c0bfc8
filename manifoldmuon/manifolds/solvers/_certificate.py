"""Bounds on how far a direction is from optimal and from tangent."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon.linalg import sym
from manifoldmuon.norms._matrix import nuclear_parts


def inner_product(x: Float[Array, "*batch m n"], y: Float[Array, "*batch m n"]):
    """`<x, y> = tr(x^T y)` of each matrix."""
    return jnp.sum(x * y, axis=(-2, -1))


def frobenius(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
    """The Frobenius norm of each matrix."""
    return jnp.sqrt(jnp.sum(x**2, axis=(-2, -1)))


def nuclear_bound(
    x: Float[Array, "*batch m n"],
    polar: Float[Array, "*batch m n"],
    gram: Float[Array, "*batch n n"] | None = None,
) -> Float[Array, "*batch"]:
    """An upper bound on the nuclear norm of a tall `x`, from an approximation of its polar factor.

    Matrix products only; see `manifoldmuon.norms._matrix.nuclear_gap` for the proof. It is tight
    where the polar factor has converged; singular values too small for that cost at most their
    own size times `sqrt(n)`. `gram` is `polar^T polar`, where it is at hand.
    """
    gained, missed = nuclear_parts(x, polar, gram)
    return gained + missed


def relative_gap(
    upper: Float[Array, "*batch"], value: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """`(upper - value) / upper`; 0 where the upper bound is 0, for then zero is optimal."""
    safe = jnp.where(upper == 0, 1, upper)
    return jnp.where(upper == 0, jnp.zeros_like(upper), jnp.maximum(upper - value, 0) / safe)


def tangent_residual(inner: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
    """`||W^T A + A^T W||_F / n`, given `W^T A`."""
    n = inner.shape[-1]
    return 2 * frobenius(sym(inner)) / max(n, 1)


def is_noise(
    length: Float[Array, "*batch"], grad: Float[Array, "*batch m n"]
) -> Bool[Array, "*batch"]:
    """Whether a tangent part of this Frobenius norm is what rounding leaves of a normal gradient.

    At a critical point `G = W S` with symmetric `S`; a full step along noise would be absurd.
    """
    return length <= 8 * jnp.finfo(grad.dtype).eps * frobenius(grad)
