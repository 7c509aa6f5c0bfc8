"""The QR retraction."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class QR(Retraction):
    """The orthonormal factor of `W + V = Q R`, with a positive diagonal in `R`.

    First order: unlike the polar factor it depends on the order of the columns, and it turns
    the first one least (Absil, Mahony and Sepulchre 2008, example 4.1.3). Undoes the distance
    that `W` has from the set.
    """

    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return positive_qr(point + vector)


def positive_qr(matrix: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """The Q of the QR decomposition whose R has a positive diagonal: a unique, smooth choice."""
    q, r = jnp.linalg.qr(matrix)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    return q * jnp.where(diagonal < 0, -1, 1).astype(q.dtype)[..., None, :]
