"""Flat space with any norm: normalised gradient descent, sign descent, Muon."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import check_step_norm
from manifoldmuon._internal.matrices.arrays import Floats, expand_trailing, nonzero_or_one, upcast
from manifoldmuon.manifolds._manifold import Manifold
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.norms import Frobenius, Norm


@dataclasses.dataclass(frozen=True)
class Euclidean(Manifold):
    """Unconstrained weights, with the steepest direction of a chosen norm.

    `Euclidean(RMSToRMS())` is Muon at the scale that transfers across widths,
    `Euclidean(Spectral())` plain Muon, `Euclidean(MaxAbs())` sign descent, `Euclidean()` normalised
    descent for biases and gains (each trailing vector is a weight; name the norm for a matrix, and
    `Frobenius(ndim=0)` for a scalar).

    Every direction is tangent and the retraction is addition. The gap comes from the duality map
    (`Norm.gap`): rounding for a converged method, more for Muon's five steps.

    Attributes:
      step_norm: the norm in which directions are steepest.
    """

    step_norm: Norm = Frobenius(ndim=1)
    constrained: ClassVar[bool] = False

    def __post_init__(self):
        check_step_norm(self, Norm)

    @property
    def ndim(self) -> int:
        return self.step_norm.ndim

    @property
    def norm(self) -> Norm:
        return self.step_norm

    @property
    def factor_ndim(self) -> int:
        return 0

    def project(self, point: Floats) -> Floats:
        return point

    def project_tangent(self, point: Floats, vector: Floats) -> Floats:
        return vector

    def steepest(self, point: Floats, grad: Floats, dual: Any = ()) -> Steepest:
        direction = self.step_norm.dualize(grad)
        gap = self.step_norm.gap(grad, direction)
        return Steepest(direction, (), jnp.zeros_like(gap), gap)

    def retract(self, point: Floats, vector: Floats) -> Floats:
        return (upcast(point) + upcast(vector)).astype(point.dtype)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Floats:
        """Return a Gaussian weight divided by its norm: flat space has no uniform distribution."""
        weight = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        size = expand_trailing(self.step_norm.norm(weight), self.ndim)
        return (weight / nonzero_or_one(size)).astype(dtype)

    def distance(self, point: Floats) -> Floats:
        leading = point.shape[: point.ndim - self.ndim]
        return jnp.zeros(leading, jnp.promote_types(point.dtype, jnp.float32))
