"""Retractions of non-negative matrices with fixed sums."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon.linalg import nearest_with_sums, sinkhorn


class StochasticRetraction(abc.ABC):
    """Moves a non-negative matrix with rows of sum 1 and columns of sum m/n, and keeps these sums.

    A frozen, hashable value. Vectors have rows and columns of sum zero; the manifold divides by its
    scale, and makes the dtype float32 or wider. Leading axes are independent. Among matrices with
    positive entries the set is flat, and a geodesic is `X + t V`.

    Attributes:
      order: `R(X, t V)` differs by O(t**(order + 1)) from it, where all entries of X are positive.
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        """A matrix of the set near `point + vector`."""


@dataclasses.dataclass(frozen=True)
class Nearest(StochasticRetraction):
    """The point of the set nearest to `X + V` in the Frobenius norm: addition, where that stays.

    Entries that would be negative become zero, and may grow again in any later step. Undoes the
    distance that X has from the set; see `manifoldmuon.linalg.nearest_with_sums`.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return nearest_with_sums(point + vector, 1.0)


@dataclasses.dataclass(frozen=True)
class Sinkhorn(StochasticRetraction):
    """`X exp(V / X)`, entry by entry, balanced by Sinkhorn's iteration: entries stay positive.

    First order (Douik and Hassibi, arXiv:1802.02628, section III-C). A step no longer than the
    smallest entries would make others of them huge or zero, so no entry changes by a larger factor
    than `exp(limit)` before the balance, and none falls below 1e-30. An entry of zero stays zero.

    Attributes:
      limit: of the exponent `V / X`.
      max_iterations: where the balancing gives up; see `manifoldmuon.linalg.sinkhorn`.

    Raises:
      ValueError: a field is not positive.
    """

    limit: float = 1.0
    max_iterations: int = 200

    order: ClassVar[float] = 1

    def __post_init__(self):
        check_fields(self, limit="(0, inf)", max_iterations="[1, inf)")

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        gone = point <= 0
        exponent = jnp.clip(vector / jnp.where(gone, 1, point), -self.limit, self.limit)
        moved = jnp.maximum(jnp.log(jnp.where(gone, 1, point)) + exponent, math.log(1e-30))
        return sinkhorn(jnp.where(gone, -jnp.inf, moved), 1.0, self.max_iterations)
