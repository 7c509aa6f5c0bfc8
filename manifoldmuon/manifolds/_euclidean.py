"""Flat space with any norm: normalised gradient descent, sign descent, Muon and its kin."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import upcast
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._points import leading, require_axes
from manifoldmuon.norms import Effort, Frobenius, Norm


@dataclasses.dataclass(frozen=True)
class Euclidean(Manifold):
    """All of space, with the steepest direction of a chosen norm.

    `Euclidean(RMSToRMS())` is Muon at the scale that transfers across widths,
    `Euclidean(Spectral())` plain Muon, `Euclidean(Infinity())` sign descent, `Euclidean()`
    normalised descent for biases and gains (each trailing vector is one weight; a matrix needs
    its norm named, and a scalar `Frobenius(ndim=0)`).

    Every direction is tangent and the retraction is addition. The gap is the duality map's own
    (`Norm.gap`): rounding for a converged method, more for Muon's five steps.

    Attributes:
      weight_norm: the norm in which directions are steepest.
    """

    weight_norm: Norm = Frobenius(ndim=1)

    @property
    def ndim(self) -> int:
        return self.weight_norm.ndim

    @property
    def flat(self) -> bool:
        return True

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)

    def project(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return point

    def tangent(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return vector

    def norm(self, vector: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.weight_norm.norm(vector)

    def init_carried(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        return self.weight_norm.init_carried(shape)

    def carried_norm(
        self, vector: Float[Array, "..."], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "..."], chex.ArrayTree]:
        return self.weight_norm.carried_norm(vector, carried, effort)

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def steepest(self, point: Float[Array, "..."], grad: Float[Array, "..."], dual) -> Steepest:
        exact = upcast(grad)  # the certificate is of the direction before it is rounded
        direction = self.weight_norm.lmo(exact)
        gap = self.weight_norm.gap(exact, direction)
        return Steepest(direction.astype(grad.dtype), (), jnp.zeros_like(gap), gap)

    def retract(
        self, point: Float[Array, "..."], vector: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        return (upcast(point) + upcast(vector)).astype(point.dtype)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        """A Gaussian weight, divided by its norm: flat space has no uniform distribution."""
        self.check_shape(shape)
        weight = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        size = jnp.expand_dims(self.norm(weight), tuple(range(-self.ndim, 0)))
        return (weight / jnp.where(size == 0, 1.0, size)).astype(dtype)

    def distance(self, point: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.zeros(leading(point, self.ndim), jnp.promote_types(point.dtype, jnp.float32))
