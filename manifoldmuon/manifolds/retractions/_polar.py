"""The polar retraction: the nearest orthonormal matrix, by matrix products alone."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import product
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Polar(Retraction):
    """`(W + V) ((W + V)^T (W + V))^{-1/2}`, the orthonormal matrix nearest to `W + V`.

    Second order (Absil, Mahony and Sepulchre 2008, section 4.1). For a tangent `V` the Gram
    matrix is `I + V^T V`, at least the identity and close to it for a small step, so that a few
    `n x n` products find its inverse root: one iteration for a learning rate of 0.1, three for
    1, up to ten for 100. The Gram matrix is formed anew from `W + V`, so whatever distance from
    the set rounding has left in `W` is undone rather than handed on.

    The iteration stops by itself and is therefore not reverse-differentiable.

    Attributes:
      max_iterations: where the iteration gives up, as it does at a rank-deficient `W + V`.
    """

    max_iterations: int = 20

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        moved = point + vector
        gram = product(moved.mT, moved)
        # 1 <= eigenvalues <= largest row sum: the middle goes to 1, where the iteration
        # converges fastest; it converges from (0, 7/3), and this leaves nothing above 2.
        middle = (1 + _row_sum(gram)) / 2
        excess = gram / middle - jnp.eye(gram.shape[-1], dtype=gram.dtype)
        root = _inverse_sqrt_minus_one(excess, self.max_iterations)
        return (moved + product(moved, root)) / jnp.sqrt(middle)


def _row_sum(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """The largest absolute row sum: an upper bound on the spectral norm."""
    return jnp.max(jnp.sum(jnp.abs(x), axis=-1), axis=-1, initial=0)[..., None, None]


def _inverse_sqrt_minus_one(
    excess: Float[Array, "*batch n n"], max_iterations: int
) -> Float[Array, "*batch n n"]:
    """`(I + E)^{-1/2} - I` for a symmetric `E`, with an error relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root and collects the product of the `p`. Carrying
    `E`, `p - I` and `D = root - I` in place of `S`, `p` and the root keeps the identity out of
    the rounding errors: near it the result is three times as accurate.
    """
    # The last step below takes E to 3/8 E^2, which is 4e-9 at this tolerance.
    tolerance = 1e-4 if excess.dtype == jnp.float32 else 1e-8

    def unfinished(carry):
        count, excess, _ = carry
        # A NaN compares false and ends the loop for its own matrix, not for the others.
        return (count < max_iterations) & jnp.any(_row_sum(excess) > tolerance)

    def step(carry):
        count, excess, root = carry
        p = 0.375 * product(excess, excess) - 0.5 * excess
        root = root + p + product(root, p)
        square = 2 * p + product(p, p)
        excess = excess + square + product(excess, square)
        return count + 1, (excess + excess.mT) / 2, root

    start = (jnp.zeros((), jnp.int32), excess, jnp.zeros_like(excess))
    _, excess, root = jax.lax.while_loop(unfinished, step, start)
    return root - 0.5 * (excess + product(root, excess))
