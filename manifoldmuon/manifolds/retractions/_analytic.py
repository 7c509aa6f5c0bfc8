"""The closed-form retraction of the manifold-Muon recipe."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import product, spectral_norm
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Analytic(Retraction):
    """`(W + V)(I - A^T A + A^T A / sqrt(1 + eta^2))` with `V = eta A` and `eta = ||V||_2`.

    Two products and the spectral norm of an `n x n` matrix (Modula documentation, orthogonal and
    Stiefel pages). It equals the polar retraction where `A` is a partial isometry, its singular
    values all 0 or 1, as a steepest direction on a square manifold is; otherwise the result misses
    the set by O(eta^4), and every distance that `W` already has is handed on. For long runs and
    for directions with other singular values use `Polar`.
    """

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        gram = product(vector.mT, vector)  # eta^2 A^T A
        root = jnp.sqrt(1 + spectral_norm(gram))[..., None, None]
        moved = point + vector
        # (1 - 1/r) / eta^2 = 1 / (r (r + 1)) with r^2 = 1 + eta^2: finite at eta = 0.
        return moved - product(moved, gram) / (root * (root + 1))
