"""The Cayley retraction."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import product
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Cayley(Retraction):
    """`(I - K/2)^{-1} (I + K/2) W` for the skew `K` with `K W = V`.

    `K = P V W^T - W V^T P` with `P = I - W W^T / 2` has rank at most 2n, so one linear system
    of size 2n suffices (Wen and Yin 2013). A rotation of the whole space: it keeps the distance
    that `W` has from the set. First order for the embedded metric on a non-square manifold,
    second order for the canonical one.
    """

    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        inner = product(point.mT, vector)
        half = vector - product(point, inner) / 2  # P V
        left = jnp.concatenate([half, point], axis=-1)  # K = left right^T
        right = jnp.concatenate([point, -half], axis=-1)
        small = product(right.mT, left) / 2
        system = jnp.eye(small.shape[-1], dtype=small.dtype) - small
        return point + product(left, jnp.linalg.solve(system, product(right.mT, point)))
