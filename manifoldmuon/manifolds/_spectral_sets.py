"""Matrices with bounded singular values: the spectral ball and the spectral band.

Internally points are tall and of unit scale; norms get arrays in the caller's orientation and
scale.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal import arguments
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares, Tall, Vectors
from manifoldmuon._internal.matrices.lapack import map_matrices, positive_qr
from manifoldmuon._internal.matrices.polar import inverse_sqrt_minus_one, largest_row_sum
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.matrices.rounding import bounded_step
from manifoldmuon._internal.scales import ScaleRule, check_scale
from manifoldmuon.linalg import TRAINING_MSIGN, positive_part, spectral_projector
from manifoldmuon.manifolds._euclidean import Euclidean
from manifoldmuon.manifolds._manifold import ScaledMatrices, require_projection, with_fast_norm
from manifoldmuon.manifolds.retractions import Clip, Retraction
from manifoldmuon.manifolds.solvers import DouglasRachford, Normal, Steepest
from manifoldmuon.norms import Norm


class BoundedSpectrum(ScaledMatrices):
    """Base of sets that bound the singular values."""

    def project(self, point: Matrices) -> Matrices:
        """Return the nearest point, by an SVD: for initialisation, not for training steps."""
        if 0 in point.shape:
            return point
        scaled, exponent = scale_to_unit_exponent(point, 2)
        return (self._scale(point) * _nearest_matrix(self, scaled, exponent)).astype(point.dtype)

    def distance(self, point: Matrices) -> Numbers:
        """Return the largest `|sigma_i - its nearest allowed value| / scale`, by an SVD."""
        unit = self._unit(point)
        if 0 in unit.shape:
            return jnp.zeros(unit.shape[:-2], unit.dtype)
        values = map_matrices(lambda x: jnp.linalg.svd(x, compute_uv=False), unit)
        return arrays.largest(jnp.abs(values - self._nearest(values)), -1)

    @abc.abstractmethod
    def _nearest(self, values: Vectors) -> Vectors:
        """Return the nearest allowed singular values, given some in descending order."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _nearest_matrix(space: BoundedSpectrum, scaled: Matrices, exponent: Any) -> Matrices:
    left, values, right = _decomposed(arrays.tall(scaled))
    sigma = _nearest_values(space, scaled, exponent)(values)
    return arrays.match_orientation(arrays.product(left * sigma[..., None, :], right), scaled)


@_nearest_matrix.defjvp
def _nearest_matrix_jvp(space, primals, tangents):
    """Differentiate a function of singular values (Daleckii and Krein 1965), also where they tie.

    Singular vectors, which jump at a tie, are not differentiated. Infinite terms become zero.
    """
    (x, exponent), change = primals, arrays.tall(tangents[0])
    left, values, right = _decomposed(arrays.tall(x))
    nearest = _nearest_values(space, x, exponent)
    sigma, slopes = jax.jvp(nearest, (values,), (jnp.ones_like(values),))
    floor = jnp.finfo(x.dtype).eps ** (2 / 3) * values[..., :1, None]

    def quotient(sign: float) -> Squares:
        """Return `(f(s_i) + sign f(s_j)) / (s_i + sign s_j)`, or the slope if that is 0 / 0."""
        above, below = (a[..., :, None] + sign * a[..., None, :] for a in (sigma, values))
        mean = (slopes[..., :, None] + slopes[..., None, :]) / 2
        apart = jnp.abs(below) > floor
        return jnp.where(apart, above / jnp.where(apart, below, 1), mean)

    turned, both = arrays.product(change, right.mT), quotient(1.0)
    inside = arrays.product(left.mT, turned)
    outside = turned - arrays.product(left, inside)
    middle = quotient(-1.0) * arrays.sym(inside) + both * arrays.skew(inside)
    share = jnp.diagonal(both, axis1=-2, axis2=-1)[..., None, :]
    tangent = arrays.product(arrays.product(left, middle) + outside * share, right)
    return _nearest_matrix(space, x, exponent), arrays.match_orientation(tangent, x)


def _nearest_values(space: BoundedSpectrum, scaled: Matrices, exponent: Any) -> Any:
    scale = space._scale(scaled)
    return lambda values: space._nearest(times_power_of_two(values, exponent, 1) / scale)


def _decomposed(x: Tall) -> Any:
    return map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)


class _WithBoundary(BoundedSpectrum):
    """Matrices with `low <= sigma_i / scale <= high`: a closed set with an interior."""

    low: float
    high: float
    solver: DouglasRachford | None
    retraction: Retraction
    active_tolerance: float
    has_boundary: ClassVar[bool] = True

    def _returned(self, unit: Tall, step: Tall) -> Tall:
        """Return a tall point of unit scale after a step."""
        return self.retraction.retract(unit, step)

    def for_training(self) -> "_WithBoundary":
        return with_fast_norm(self, solver=None)

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        """Return the nearest displacement that stays in the set: at the boundary, on a cone."""
        return vector + self._normal(point)(-vector)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        if self.solver is None:
            return Euclidean(self.norm).steepest(point, grad, dual)
        return self.solver.solve(self.norm, Normal(self._normal(point), cone=True), grad, ())

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        scale = self._scale(point)
        step = arrays.tall(bounded_step(vector, scale, self.retraction.longest, 2))
        new_point = self._returned(self._unit(point), step)
        return scale * arrays.match_orientation(new_point, point)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        """Return a point with random singular vectors and values, each uniformly distributed."""
        *batch, m, n = shape
        wide = jnp.promote_types(dtype, jnp.float32)
        keys = jax.random.split(key, 3)
        rank = min(m, n)
        sides = [
            positive_qr(jax.random.normal(k, (*batch, size, rank), wide))
            for k, size in zip(keys[:2], (m, n), strict=True)
        ]
        values = jax.random.uniform(keys[2], (*batch, 1, rank), wide, self.low, self.high)
        weight = arrays.product(sides[0] * values, sides[1].mT)
        return (self._scale(weight) * weight).astype(dtype)

    def _nearest(self, values: Vectors) -> Vectors:
        return jnp.clip(values, self.low, self.high)

    def _normal(self, point: Matrices):
        """Return the projection onto the cone of directions whose negative leaves the set.

        With the polar factor M of the touching singular vectors these are `-M S` at the upper edge
        and `M S` at the lower edge, with S positive semi-definite.
        """
        low, high, unit = self.low, self.high, self._unit(point)
        gram = arrays.product(unit.mT, unit)

        def cone(sign: float, edge: float, touching: Squares):
            # M is the point times the touching part of `(I + beyond)^(-1/2) / edge`; `beyond` is
            # zero for singular values on the edge.
            beyond = arrays.product(touching, arrays.product(gram, touching)) / edge**2 - touching
            return sign, touching, arrays.product(touching, _inverse_root(beyond)) / edge

        near = self.active_tolerance
        cones = [cone(-1.0, high, spectral_projector(gram, (high - near) ** 2))]
        if low > 0:
            cones.append(cone(1.0, low, spectral_projector(-gram, -((low + near) ** 2))))

        def normal(vector: Matrices) -> Matrices:
            inner = arrays.product(unit.mT, arrays.tall(vector))
            total = jnp.zeros_like(inner)
            for sign, touching, root in cones:
                component = sign * arrays.sym(arrays.product(root, arrays.product(inner, touching)))
                total = total + sign * arrays.product(root, positive_part(component))
            return arrays.match_orientation(arrays.product(unit, total), vector)

        return normal


@dataclasses.dataclass(frozen=True)
class SpectralBall(_WithBoundary):
    """Matrices of spectral norm at most `scale`: a bound on how much a layer can stretch.

    In the interior every direction is tangent and the steepest direction is `msign(G)`. At the
    boundary a descent step may not increase the touching singular values: the direction is
    `msign(G + U S V^T)` with their singular vectors U, V and a positive semi-definite multiplier S.
    The retraction clips the overshoot of a finite step.

    Attributes:
      scale: the largest singular value, a positive number or a rule such as `FanRatio()`.
      solver: finds the multiplier; None leaves the boundary to the retraction alone. Directions are
        then steepest in flat space (projected steepest descent): cheaper, but neither tangent nor
        steepest at the boundary. Descent reaches minima in the Frobenius norm, and in a ball in the
        spectral norm. In other norms, and in a band, it may stop far from minima;
        `manifold_muon(..., clip=project_tangent(geometry))` mends that.
      retraction: how a step returns to the set.
      step_norm: the norm of steps, any norm of matrices, used as given; None: the spectral norm
        relative to the scale. In norms that depend on the basis (`MaxAbs`, `MaxRowNorm`) descent
        may stop short of a minimum until learning rates fall below `active_tolerance`.
      active_tolerance: the distance from the boundary, relative to the scale, within which a
        singular value counts as touching and moves no closer. At a minimum on the boundary this
        loses up to `active_tolerance` times the nuclear norm of the gradient.
    """

    scale: float | ScaleRule = 1.0
    solver: DouglasRachford | None = DouglasRachford()
    retraction: Retraction = Clip()
    step_norm: Norm | None = None
    active_tolerance: float = 1e-3
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_boundary_fields(self)
        arguments.check_retraction(self, "matrices of norm at most 1")

    def for_training(self) -> "SpectralBall":
        # Not for bands, which need a sign that converges; see `Clip.method`.
        default = self.retraction == Clip()
        retraction = Clip(TRAINING_MSIGN) if default else self.retraction
        return with_fast_norm(self, solver=None, retraction=retraction)


@dataclasses.dataclass(frozen=True)
class SpectralBand(_WithBoundary):
    """Matrices with singular values between `low` and `high` times the scale.

    `SpectralBand(1 / k, k)` bounds the condition number of a weight by `k**2`: from nearly
    orthonormal matrices (k slightly above 1; `Stiefel` is k = 1) to flat space (k large).
    Directions are as in `SpectralBall`, with a multiplier for each edge.

    Attributes:
      low: the smallest singular value, relative to the scale; positive.
      high: the largest singular value, relative to the scale; above `low + 4 * active_tolerance`.
      scale: see `SpectralBall`.
      solver: see `SpectralBall`. With None and spectral steps, descent may stop away from a minimum
        with singular values at both edges.
      retraction: how a step returns to the set: `Clip`, with any method.
      step_norm: see `SpectralBall`.
      active_tolerance: see `SpectralBall`.
    """

    low: float = 0.5
    high: float = 2.0
    scale: float | ScaleRule = 1.0
    solver: DouglasRachford | None = DouglasRachford()
    retraction: Clip = Clip()
    step_norm: Norm | None = None
    active_tolerance: float = 1e-3

    def __post_init__(self):
        _check_boundary_fields(self)
        arguments.check_fields(self, low="[0, inf)", high="(0, inf)")
        arguments.check_kind(self, "retraction", Clip)
        if self.low == 0:
            raise ValueError("SpectralBand.low must be positive; without it take SpectralBall")
        if not self.low + 4 * self.active_tolerance < self.high:
            raise ValueError(
                "SpectralBand takes low + 4 * active_tolerance < high; got "
                f"{self.low!r}, {self.high!r} and {self.active_tolerance!r}. For equal singular "
                "values take Stiefel(scale)"
            )

    def _returned(self, unit: Tall, step: Tall) -> Tall:
        return self.retraction.clip(unit + step, self.low, self.high)


def _inverse_root(excess: Squares) -> Squares:
    """Return `(I + E)^{-1/2}`, inexact if eigenvalues of `I + E` are beyond 1e4 or below 1e-4."""
    identity = arrays.identity_like(excess)
    # The iteration converges up to 7/3: weights on or near the set need no division.
    size = largest_row_sum(excess)
    middle = jnp.where(size > 1, 1 + size / 2, 1)
    root = inverse_sqrt_minus_one((excess - (middle - 1) * identity) / middle, 8)
    return (identity + root) / jnp.sqrt(middle)


def _check_boundary_fields(manifold: _WithBoundary) -> None:
    check_scale(f"{type(manifold).__name__}.scale", manifold.scale)
    arguments.check_step_norm(manifold, Norm)
    arguments.check_kind(manifold, "solver", DouglasRachford, type(None))
    require_projection(manifold, manifold.solver)
    arguments.check_fields(manifold, active_tolerance="(0, 0.1)")
