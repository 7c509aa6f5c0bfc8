"""Retractions of spheres."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import Vectors, expand_trailing, inner_product
from manifoldmuon._internal.matrices.powers_of_two import to_unit_norm
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Normalize(Retraction):
    """`(w + v) / ||w + v||`: the nearest point of the sphere, second order.

    For a tangent step of length eta the divisor is `sqrt(1 + eta**2)`; the actual length is
    computed instead, so that errors do not accumulate over steps.
    """

    points: ClassVar[tuple[str, ...]] = ("unit vectors",)
    order: ClassVar[float] = 2
    longest: ClassVar[float] = math.inf

    def retract(self, point: Vectors, vector: Vectors) -> Vectors:
        return to_unit_norm(point + vector, 1)


@dataclasses.dataclass(frozen=True)
class Geodesic(Retraction):
    """The great circle: `cos(eta) w + sin(eta) v / eta` with `eta = ||v||`.

    Exact, so a step of length pi arrives at the antipode.
    """

    points: ClassVar[tuple[str, ...]] = ("unit vectors",)
    order: ClassVar[float] = math.inf

    def retract(self, point: Vectors, vector: Vectors) -> Vectors:
        # The series have derivatives at zero, where a length has none. Their errors are below the
        # rounding of float64, also in first derivatives. (JAX 0.12 rejects jnp.sinc inside of
        # shard_map.)
        square = expand_trailing(inner_product(vector, vector, 1), 1)
        short = square < 2e-5
        angle = jnp.sqrt(jnp.where(short, 1, square))
        cosine = 1 - square / 2 * (1 - square / 12 * (1 - square / 30))
        cosine = jnp.where(short, cosine, jnp.cos(angle))
        sine = 1 - square / 6 * (1 - square / 20 * (1 - square / 42))
        sine = jnp.where(short, sine, jnp.sin(angle) / angle)
        return cosine * point + sine * vector
