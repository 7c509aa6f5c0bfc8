"""Retractions of spheres."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    frobenius_norm,
    normalize,
)


class SphereRetraction(abc.ABC):
    """Moves unit vectors along tangent vectors, on the sphere of radius 1.

    A frozen, hashable value. Vectors lie in the last axis; arithmetic is done in the dtype of
    the arguments, which the manifolds make float32 or wider.

    Attributes:
      order: `R(w, t v)` differs from the great circle by O(t**(order + 1)).
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        """A unit vector near `point + vector`, for a tangent `vector`."""


@dataclasses.dataclass(frozen=True)
class Normalize(SphereRetraction):
    """`(w + v) / ||w + v||`: the nearest point of the sphere, second order.

    For a tangent step of length eta the divisor is `sqrt(1 + eta**2)`; computing the true
    length instead undoes whatever distance rounding has left in `w`.
    """

    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        return normalize(point + vector, 1)


@dataclasses.dataclass(frozen=True)
class Geodesic(SphereRetraction):
    """The great circle: `cos(eta) w + sin(eta) v / eta` with `eta = ||v||`.

    Exact, so a step of length pi arrives at the antipode. It keeps the distance that a point
    already has from the sphere; rounding accumulates over many steps.
    """

    order: ClassVar[float] = math.inf

    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        angle = frobenius_norm(vector, 1)[..., None]
        # jnp.sinc is sin(pi x) / (pi x), finite at zero and with a derivative there.
        return jnp.cos(angle) * point + jnp.sinc(angle / jnp.pi) * vector
