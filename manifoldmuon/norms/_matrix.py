"""Singular-value functions that the spectral norms share: sums, maxima and a cheap certificate."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import MsignMethod, msign, prescale, product, times_power_of_two, upcast
from manifoldmuon.norms._axes import trailing


def fan_ratio(matrix: Float[Array, "*batch m n"]) -> float:
    """`sqrt(d_out / d_in)` of a `(d_out, d_in)` matrix; 1 for an empty one."""
    trailing(matrix, 2)
    d_out, d_in = matrix.shape[-2:]
    return math.sqrt(d_out / d_in) if d_out and d_in else 1.0


def cold_vector(shape: tuple[int, ...]) -> Float[Array, "*batch n"]:
    """What `power_iteration` of matrices of this shape takes for a cold start."""
    *batch, _, n = shape
    return jnp.zeros((*batch, n), jnp.float32)


def polar_factor(
    matrix: Float[Array, "*batch m n"], method: MsignMethod | None
) -> Float[Array, "*batch m n"]:
    """`msign` in float32 or wider, of a matrix at any scale, denormal entries included."""
    return msign(upcast(matrix), method)


def nuclear_norm(matrix: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
    """The sum of the singular values, by an SVD without vectors."""
    scaled, exponent = prescale(matrix, 2)
    if 0 in scaled.shape:
        return jnp.zeros(scaled.shape[:-2], scaled.dtype)
    values = jnp.linalg.svd(scaled, compute_uv=False)
    return times_power_of_two(jnp.sum(values, axis=-1), exponent)


def nuclear_gap(
    grad: Float[Array, "*batch m n"], sign: Float[Array, "*batch m n"]
) -> Float[Array, "*batch"]:
    """An upper bound on `1 - <G, A> / ||G||_*` from two products, for an approximate `msign`.

    A method of msign returns `A = U f V^T` with `f_i >= 0` close to 1 for `G = U S V^T`. Since
    `|1 - f| <= |1 - f**2|`,

    `||G||_* = <G, A> + sum s_i (1 - f_i) <= <G, A> + ||G - G A^T A||_*`,

    and the last nuclear norm is at most `sqrt(n)` times the Frobenius norm. The bound is tight
    to rounding where the method has converged and loose where it has not: `f = 0.7` throughout
    is a loss of 0.3 and gives 0.42.

    Args:
      grad: `G`, at any scale.
      sign: `A`, the approximation of `msign(G)`.

    Returns:
      The bound, 0 for a zero gradient; float32 or wider.
    """
    scaled, _ = prescale(grad, 2)
    return relative_gap(*nuclear_parts(scaled, upcast(sign)))


def nuclear_parts(
    grad: Float[Array, "*batch m n"],
    sign: Float[Array, "*batch m n"],
    gram: Float[Array, "*batch k k"] | None = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """What the direction gains and what it may miss: `||G||_* <= gained + missed`.

    Args:
      grad: `G`.
      sign: `A`, which shares its singular vectors.
      gram: the Gram matrix of the smaller side of `A`, where it is at hand.
    """
    g, a = tall_view(grad), tall_view(sign)
    left = g - product(g, product(a.mT, a) if gram is None else gram)
    missed = math.sqrt(g.shape[-1]) * jnp.sqrt(jnp.sum(left**2, axis=(-2, -1)))
    return jnp.sum(g * a, axis=(-2, -1)), missed


def relative_gap(
    gained: Float[Array, "*batch"], missed: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """`missed / (gained + missed)`, and 0 where both are 0."""
    bound = gained + missed
    return missed / jnp.where(bound == 0, 1.0, bound)


def tall_view(matrix: Float[Array, "*batch m n"]) -> Float[Array, "*batch p q"]:
    """The matrix or its transpose, whichever has at least as many rows as columns."""
    return matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix
