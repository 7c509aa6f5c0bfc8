"""The derivative of the orthogonal polar factor, finite and right at orthonormal points."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import mT, product, sym


def polar_derivative(
    x: Float[Array, "*batch m n"],
    factor: Float[Array, "*batch m n"],
    tangent: Float[Array, "*batch m n"],
) -> Float[Array, "*batch m n"]:
    """The derivative of the polar factor at `x = Q H` in the direction `E`.

    `Q A + (I - Q Q^T) E H^-1` with the skew A that solves `H A + A H = Q^T E - E^T Q` (Higham,
    Functions of Matrices, 2008, sec. 8.1, by differentiating `x = Q H`). Both equations are
    solved in the eigenbasis of H, but are told to JAX as linear equations: their own derivative
    needs no derivative of the eigenvectors, so that higher derivatives are right as well.

    Args:
      x: tall or square.
      factor: Q, its polar factor.
      tangent: E.

    Returns:
      The derivative. Where H is singular to rounding the pseudo-inverse stands in: what would
      be infinite contributes zero.
    """
    h = sym(product(mT(factor), x))
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(h))
    floor = values[..., -1:] * x.shape[-2] * jnp.finfo(x.dtype).eps
    over_values = _inverse(values, floor)[..., None, :]
    over_sums = _inverse(values[..., :, None] + values[..., None, :], floor[..., None])

    def solve_turn(right):
        inside = product(product(mT(vectors), right), vectors)
        return product(product(vectors, inside * over_sums), mT(vectors))

    def solve_leave(right):
        return product(product(right, vectors) * over_values, mT(vectors))

    along = product(mT(factor), tangent)
    turn = _linear_solve(lambda a: product(h, a) + product(a, h), solve_turn, along - mT(along))
    leave = _linear_solve(lambda a: product(a, h), solve_leave, tangent - product(factor, along))
    return product(factor, turn) + leave


def _linear_solve(operator, solve, right):
    return jax.lax.custom_linear_solve(operator, right, lambda _, b: solve(b), symmetric=True)


def _inverse(values, floor):
    """One over what exceeds the floor, zero for the rest; NaN stays NaN."""
    keep = ~(values <= floor)
    return jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)
