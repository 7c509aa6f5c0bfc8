"""Matrices of a given spectral norm: the spectral sphere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_kind, check_step_norm
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Vectors
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, to_unit_norm
from manifoldmuon._internal.matrices.rounding import noise_share, without
from manifoldmuon._internal.matrices.spectral import (
    largest_eigenpair,
    largest_eigenvalue,
    pair_uncertainty,
)
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.linalg import spectral_norm
from manifoldmuon.manifolds._manifold import with_fast_norm
from manifoldmuon.manifolds._spectral_sets import BoundedSpectrum
from manifoldmuon.manifolds._spheres import steepest_across
from manifoldmuon.manifolds.solvers import LineMultiplier, Steepest
from manifoldmuon.norms import Norm, Spectral

# Lanczos steps of the retraction: their error takes points off the set.
_LANCZOS = 56


@dataclasses.dataclass(frozen=True)
class SpectralSphere(BoundedSpectrum):
    """Matrices of spectral norm `scale`: `||W||_2 = s`, all other singular values are free.

    If the largest singular value is simple, with singular vectors u and v, the tangent space is
    `u^T A v = 0` and the steepest direction in the spectral norm is `msign(G - t u v^T)` with the
    multiplier t that makes it tangent (spectral sphere optimizer, arXiv:2601.08393). If it is not
    simple, the set has a corner, and the line of the singular pair found by Lanczos' method
    replaces the normal cone.

    Attributes:
      scale: the spectral norm, a positive number or a rule such as `FanRatio()`.
      step_norm: the norm of steps, any norm of matrices, used as given; None: the spectral norm
        relative to the scale.
      solver: finds the multiplier.
      lanczos: steps of Lanczos' method for the singular pair of the normal. If the largest singular
        values nearly tie, the pair is a mixture of theirs.
    """

    scale: float | ScaleRule = 1.0
    step_norm: Norm | None = None
    solver: LineMultiplier = LineMultiplier()
    lanczos: int = 64

    def __post_init__(self):
        check_scale("SpectralSphere.scale", self.scale)
        check_kind(self, "solver", LineMultiplier)
        check_step_norm(self, Norm)
        check_fields(self, lanczos="[1, inf)")

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        return without(self._normal(point), vector, 2)

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        return () if self.norm.is_euclidean else self.solver.init(shape[:-2], 0)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        unit, sine = self._normal(point), pair_uncertainty(self._unit(point), self.lanczos)
        dual = self._dual(dual, grad.shape)
        result = steepest_across(unit, 2, self.norm, self.solver, grad, dual)
        gap = self._with_uncertainty(result, grad, unit, sine)
        normal = self._is_normal(point, grad)
        direction = jnp.where(arrays.expand_trailing(normal, 2), 0, result.direction)
        gap = jnp.where(normal, 1, gap)
        return result._replace(direction=direction, gap=gap)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        """Return `(W + V) s / ||W + V||_2`, with the norm by 56 steps of Lanczos' method.

        For matrices with more than 56 columns and nearly tied largest singular values, the relative
        error of the norm is up to 1e-3.
        """
        new_point, _ = scale_to_unit_exponent(arrays.upcast(point) + arrays.upcast(vector), 2)
        high = arrays.tall(new_point)
        square = largest_eigenvalue(arrays.product(high.mT, high), _LANCZOS)
        size = arrays.expand_trailing(jnp.sqrt(square), 2)
        return self._scale(point) * new_point / arrays.nonzero_or_one(size)

    def for_training(self) -> "SpectralSphere":
        """Return this set with at most two signs per step and 24 steps of Lanczos' method."""
        solver = dataclasses.replace(self.solver, steps=min(self.solver.steps, 2))
        return with_fast_norm(self, solver=solver, lanczos=min(self.lanczos, 24))

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        """Return a Gaussian matrix divided by its norm."""
        gaussian = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        size = arrays.expand_trailing(spectral_norm(gaussian), 2)
        return (self._scale(gaussian) * gaussian / arrays.nonzero_or_one(size)).astype(dtype)

    def _nearest(self, values: Vectors) -> Vectors:
        return jnp.minimum(values, 1).at[..., 0].set(1)

    def _with_uncertainty(
        self, result: Steepest, grad: Matrices, unit: Matrices, sine: Numbers
    ) -> Numbers:
        """Return the gap for the true normal N, given the gap for its approximation U.

        For any B of norm 1 orthogonal to U, `(B - <B, N> N) / (1 + |<B, N>| norm(N))` is tangent.
        In unitarily invariant norms `B - u u^T B` is tangent, too, and costs at most `||G||_F`.
        """
        scaled, _ = scale_to_unit_exponent(grad, 2)
        direction, whole = result.direction, arrays.frobenius_norm(scaled)
        value = arrays.inner_product(scaled, direction)
        upper = value / arrays.nonzero_or_one(1 - result.gap)
        longest = arrays.frobenius_norm(direction)
        along = jnp.abs(arrays.inner_product(scaled, unit)) + jnp.minimum(1.5 * sine, 1) * whole
        if self.norm.is_euclidean or isinstance(self.norm, Spectral):
            size = scale_of(self.norm.scale, grad.shape[-2:])
            share = jnp.minimum(3 * sine, 1)
            most = jnp.minimum((1 + share) * upper + share * size * along, upper + size * whole)
            least = jnp.maximum((value - share * size * along) / (1 + share), value - size * whole)
        else:
            share = 3 * sine * longest * self.norm.bound(unit)
            lost = 1.5 * sine * longest * along
            most, least = (1 + share) * upper + lost, (value - lost) / (1 + share)
        gap = arrays.relative_gap(most, jnp.maximum(least, 0))
        return jnp.where((result.gap == 1) | (longest == 0), result.gap, gap)

    def _is_normal(self, point: Matrices, grad: Matrices) -> Bool[Array, "*batch"]:
        """Return whether `G = W H` with `H = sym(W^T G)`, up to rounding, and G is not zero.

        At a corner these gradients are the combinations of tied singular pairs, including `u v^T`.
        """
        unit, (scaled, _) = self._unit(point), scale_to_unit_exponent(grad, 2)
        scaled = arrays.tall(scaled)
        normal = arrays.product(unit, arrays.sym(arrays.product(unit.mT, scaled)))
        rest = arrays.frobenius_norm(scaled - normal)
        size = arrays.frobenius_norm(scaled)
        return (rest <= noise_share(point.dtype) * size) & (size > 0)

    def _normal(self, point: Matrices) -> Matrices:
        """Return `u v^T` for the largest singular value."""
        unit = self._unit(point)
        _, right = largest_eigenpair(arrays.product(unit.mT, unit), self.lanczos)
        left = to_unit_norm(arrays.product(unit, right[..., None])[..., 0], 1)
        return arrays.match_orientation(left[..., :, None] * right[..., None, :], point)
