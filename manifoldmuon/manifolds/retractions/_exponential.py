"""The exponential map."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import product
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Exponential(Retraction):
    """The geodesic of the embedded (Euclidean) metric, followed for time 1.

    `[W V] exp([[K, -S], [I, K]]) [I; 0] exp(-K)` with `K = W^T V` and `S = V^T V`: one matrix
    exponential of size 2n and one of size n (Edelman, Arias and Smith 1998, section 2.2.2).
    Not the geodesic of the canonical metric, which differs from it unless `K = 0` or `W` is
    square. The dearest of the retractions, and the one to compare the others with; it keeps
    the distance that `W` has from the set.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        n = point.shape[-1]
        inner = product(point.mT, vector)
        inner = (inner - inner.mT) / 2
        gram = product(vector.mT, vector)
        one = jnp.broadcast_to(jnp.eye(n, dtype=point.dtype), gram.shape)
        block = jnp.block([[inner, -gram], [one, inner]])
        # Square W: W^T V is skew and S = -K^2; the formula stays valid, nothing is special.
        columns = jax.scipy.linalg.expm(block)[..., :, :n]
        basis = jnp.concatenate([point, vector], axis=-1)
        return product(product(basis, columns), jax.scipy.linalg.expm(-inner))
