"""The sphere of vectors of one Euclidean norm."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import prescale, upcast
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._points import leading, require_axes, stay_if_still
from manifoldmuon.manifolds._scale import ScaleRule, check_scale, scale_of
from manifoldmuon.manifolds._vectors import unit_tangent, without_radial
from manifoldmuon.manifolds.retractions import Normalize, SphereRetraction
from manifoldmuon.norms import Frobenius
from manifoldmuon.norms._frobenius import normalize


@dataclasses.dataclass(frozen=True)
class Hypersphere(Manifold):
    """Weights of Euclidean norm `radius`: `||w||_2 = r`.

    The tangent space at `w` is what is orthogonal to it, `a - w <w, a> / ||w||^2`; the steepest
    direction is the tangent part of the gradient at length `r`, so that a learning rate is an
    angle. The all-zero point has no direction: it stays where it is, and `distance` is 1.

    Attributes:
      radius: a positive number or a rule such as `RootDim()` (unit root-mean-square norm).
      ndim: how many trailing axes make one point; with more than one the entries are taken
        together, as one long vector.
      retraction: how a step returns to the sphere.
    """

    radius: float | ScaleRule = 1.0
    ndim: int = 1
    retraction: SphereRetraction = Normalize()

    def __post_init__(self):
        check_scale("Hypersphere.radius", self.radius)
        if self.ndim < 1:
            raise ValueError(f"Hypersphere.ndim must be at least 1; got {self.ndim}")

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)

    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return (self._radius(point) * normalize(point, self.ndim)).astype(point.dtype)

    def tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        unit = normalize(self._flat(point), 1)
        scaled, exponent = prescale(self._flat(vector), 1)
        tangent = without_radial(unit, scaled)
        back = jnp.ldexp(jnp.ones((), scaled.dtype), exponent)[..., None]
        return (tangent * back).astype(vector.dtype).reshape(vector.shape)

    def norm(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        length = Frobenius(self.ndim).norm(upcast(vector)) / self._radius(vector)
        return length.astype(vector.dtype)

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def steepest(self, point: Float[Array, "..."], grad: Float[Array, "..."], dual) -> Steepest:
        flat = upcast(self._flat(grad))
        direction, residual = unit_tangent(upcast(self._flat(point)), flat)
        # Exact to rounding, or no direction at all: then the gradient was all radial.
        missed = jnp.any(flat != 0, axis=-1) & jnp.all(direction == 0, axis=-1)
        gap = jnp.where(missed, 1.0, 0 * residual)
        direction = (self._radius(grad) * direction).astype(grad.dtype).reshape(grad.shape)
        return Steepest(direction, (), residual, gap)

    def retract(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        radius = self._radius(point)
        unit, step = (upcast(self._flat(x)) / radius for x in (point, vector))
        moved = radius * self.retraction.retract(unit, step)
        return stay_if_still(point, vector, moved.reshape(point.shape), self.ndim)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        self.check_shape(shape)
        gaussian = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        return self.project(gaussian).astype(dtype)

    def distance(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        length = Frobenius(self.ndim).norm(upcast(point))
        return jnp.abs(length / self._radius(point) - 1)

    def _radius(self, point: Float[Array, "..."]) -> float:
        return scale_of(self.radius, point.shape[point.ndim - self.ndim :])

    def _flat(self, x: Float[Array, "..."]) -> Float[Array, "*batch d"]:
        """The point's axes as one."""
        shape = leading(x, self.ndim)
        return x.reshape(*shape, math.prod(x.shape[x.ndim - self.ndim :]))
