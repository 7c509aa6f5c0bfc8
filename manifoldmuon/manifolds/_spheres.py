"""Spheres of vectors: a sphere for a whole weight, or for each row of a table."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal import arguments
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats, Matrices, Numbers, Vectors
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, to_unit_norm
from manifoldmuon._internal.matrices.rounding import bounded_step, without
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon.linalg import BOUNDED_MSIGN, TRAINING_MSIGN
from manifoldmuon.manifolds import solvers
from manifoldmuon.manifolds._manifold import Manifold, require_projection, with_fast_norm
from manifoldmuon.manifolds.retractions import Normalize, Retraction
from manifoldmuon.norms import Frobenius, MaxRowNorm, Norm, RootDim, Spectral

_SMOOTH = (BOUNDED_MSIGN, TRAINING_MSIGN)


def steepest_across(
    unit: Floats, ndim: int, norm: Norm, solver: solvers.Solver, grad: Floats, dual: Any
) -> solvers.Steepest:
    """Return the steepest direction orthogonal to every unit vector over `ndim` axes."""
    if not norm.is_euclidean:
        return solver.solve(norm, solvers.Normal.line(unit, ndim), grad, dual)
    direction, gap, residual = solvers.euclidean_direction(
        grad, lambda v: without(unit, v, ndim), norm.ndim
    )
    size = scale_of(norm.scale, grad.shape[grad.ndim - norm.ndim :])
    return solvers.Steepest(size * direction, (), residual, gap)


@dataclasses.dataclass(frozen=True)
class Hypersphere(Manifold):
    """Weights of Euclidean norm `scale`: `||w||_2 = r`.

    Tangent vectors at `w` are orthogonal to it; the projection is `a - w <w, a> / ||w||^2`. By
    default the steepest direction is the tangent part of the gradient at length `r`, so that a
    learning rate is an angle to first order. In any other norm it is `dualize(g - t w)` with the
    multiplier t that makes it tangent: `Hypersphere(RootRank(), ndim=2, step_norm=Spectral())` is a
    matrix of fixed Frobenius norm with spectral steps, as in Muon on a hypersphere
    (arXiv:2603.28743, 2606.16899; both leave the multiplier out).

    The all-zero point has no direction: a zero step leaves it unchanged, its `distance` is 1, and
    `project` makes all of its entries equal.

    Attributes:
      scale: the radius, a positive number or a rule such as `RootDim()` (unit root-mean-square
        norm).
      ndim: the number of trailing axes of a point; the entries of several axes form a single long
        vector.
      retraction: how a step returns to the sphere.
      step_norm: the norm of steps, any norm for as many axes, used as given; None: the Euclidean
        norm relative to the scale.
      solver: finds the multiplier if the norm is not Euclidean.
    """

    scale: float | ScaleRule = 1.0
    ndim: int = 1
    retraction: Retraction = Normalize()
    step_norm: Norm | None = None
    solver: solvers.LineMultiplier = solvers.LineMultiplier()

    def __post_init__(self):
        check_scale("Hypersphere.scale", self.scale)
        arguments.check_retraction(self, "unit vectors")
        arguments.check_kind(self, "solver", solvers.LineMultiplier)
        arguments.check_fields(self, ndim="[1, inf)")
        arguments.check_step_norm(self, Norm)

    @property
    def norm(self) -> Norm:
        return Frobenius(self.ndim, self.scale) if self.step_norm is None else self.step_norm

    def for_training(self) -> "Hypersphere":
        if self.norm.is_euclidean:
            return self
        return with_fast_norm(self, solver=dataclasses.replace(self.solver, steps=1))

    def project(self, point: Floats) -> Floats:
        unit = to_unit_norm(point, self.ndim)
        equal = 1 / math.sqrt(max(math.prod(self._point_shape(point)), 1))
        nowhere = jnp.all(unit == 0, axis=arrays.trailing(unit, self.ndim), keepdims=True)
        return (self._radius(point) * jnp.where(nowhere, equal, unit)).astype(point.dtype)

    def project_tangent(self, point: Floats, vector: Floats) -> Floats:
        return without(to_unit_norm(point, self.ndim), vector, self.ndim)

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        closed = self.norm.is_euclidean
        return () if closed else self.solver.init(shape[: len(shape) - self.ndim], 0)

    def steepest(self, point: Floats, grad: Floats, dual: Any = ()) -> solvers.Steepest:
        unit, dual = to_unit_norm(point, self.ndim), self._dual(dual, grad.shape)
        return steepest_across(unit, self.ndim, self.norm, self.solver, grad, dual)

    def retract(self, point: Floats, vector: Floats) -> Floats:
        radius = self._radius(point)
        unit = arrays.upcast(self._flat(point)) / radius
        step = bounded_step(self._flat(vector), radius, self.retraction.longest, 1)
        return (radius * self.retraction.retract(unit, step)).reshape(point.shape)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Floats:
        gaussian = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32))
        return self.project(gaussian).astype(dtype)

    def distance(self, point: Floats) -> Floats:
        return jnp.abs(Frobenius(self.ndim, self.scale).norm(arrays.upcast(point)) - 1)

    def _radius(self, point: Floats) -> float:
        return scale_of(self.scale, self._point_shape(point))

    def _point_shape(self, x: Floats) -> tuple[int, ...]:
        return x.shape[x.ndim - self.ndim :]

    def _flat(self, x: Floats) -> Vectors:
        """Flatten the axes of each point."""
        return x.reshape(*x.shape[: x.ndim - self.ndim], math.prod(self._point_shape(x)))


@dataclasses.dataclass(frozen=True)
class EmbeddingRows(Manifold):
    """Tables `(vocabulary, d)` with rows on the sphere of length `scale`.

    By default the norm of a direction is its largest row norm, relative to the scale, so the
    steepest direction turns every row by the same angle: the l1-to-RMS geometry of an embedding
    (modular duality, arXiv:2410.21265). For a table stored as `(d, vocabulary)`, or a matrix with
    columns of fixed length, use `EmbeddingRows().transposed()`.

    In the spectral norm, for a matrix with neurons of fixed length (the oblique manifold), the
    direction is `msign(G - diag(t) W)` with a multiplier for each row.

    Every row takes a full step along its momentum, even if no batch contains it: at momentum 0.95 a
    token seen once moves for another 270 steps. The row rests once its tangent gradient is below
    the norm's `threshold` times the longest of its table; see `manifoldmuon.norms.MaxRowNorm` for a
    shorter time. An all-zero row (a padding token) stays zero while its gradient is zero; `project`
    makes its entries equal.

    Attributes:
      scale: a positive number or a rule; the default `RootDim()` is sqrt(d), unit root-mean-square
        norm.
      retraction: how a step returns to the spheres.
      step_norm: the norm of steps, any norm of matrices, used as given; None: `MaxRowNorm` relative
        to the scale.
      solver: finds the multipliers if the norm is neither `MaxRowNorm` nor `Frobenius`. In training
        `BarzilaiBorwein()` is cheaper, with a smooth duality map such as
        `Spectral(TRAINING_MSIGN)`.
    """

    scale: float | ScaleRule = RootDim()
    retraction: Retraction = Normalize()
    step_norm: Norm | None = None
    solver: solvers.BarzilaiBorwein | solvers.DouglasRachford = solvers.DouglasRachford()
    ndim: ClassVar[int] = 2

    def __post_init__(self):
        check_scale("EmbeddingRows.scale", self.scale)
        arguments.check_retraction(self, "unit vectors")
        arguments.check_kind(self, "solver", solvers.BarzilaiBorwein, solvers.DouglasRachford)
        arguments.check_step_norm(self, Norm)
        require_projection(self, self.solver)

    @property
    def factor_ndim(self) -> int:
        return 1

    @property
    def norm(self) -> Norm:
        return MaxRowNorm(self.scale) if self.step_norm is None else self.step_norm

    def for_training(self) -> "EmbeddingRows":
        """Return this set with fewer steps of the solver.

        A single step of `BarzilaiBorwein` in the spectral norm, at most four steps of the solver in
        other norms. The gap includes the cost: about 15 % for `MaxAbs()`.
        """
        norm = self.norm.for_training()
        if self._closed:
            return self
        # A single step per gradient needs a smooth duality map.
        smooth = isinstance(norm, Spectral) and norm.method in _SMOOTH
        few = dataclasses.replace(self.solver, steps=min(self.solver.steps, 4))
        return with_fast_norm(self, solver=solvers.BarzilaiBorwein(steps=1) if smooth else few)

    def project(self, point: Matrices) -> Matrices:
        return self._row.project(point)

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        return without(to_unit_norm(point, 1), vector, 1)

    def init_dual(self, shape: tuple[int, ...]) -> Any:
        return () if self._closed else self.solver.init(shape[:-1], 1)

    @property
    def _closed(self) -> bool:
        """Return whether the direction has a closed form."""
        return isinstance(self.norm, MaxRowNorm) or self.norm.is_euclidean

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> solvers.Steepest:
        unit, norm = to_unit_norm(point, 1), self.norm
        if isinstance(norm, MaxRowNorm):
            return self._by_row(norm, unit, grad)
        return steepest_across(unit, 1, norm, self.solver, grad, self._dual(dual, grad.shape))

    def _by_row(self, norm: MaxRowNorm, unit: Matrices, grad: Matrices) -> solvers.Steepest:
        direction, gaps, residual = solvers.euclidean_direction(
            grad, lambda v: without(unit, v, 1), 1
        )
        scaled, _ = scale_to_unit_exponent(grad, 2)  # a common scale, to compare rows
        gains = arrays.frobenius_norm(without(unit, scaled, 1), 1)
        direction = jnp.where(arrays.expand_trailing(norm.stale(gains), 1), 0, direction)
        # Rounding adds to a row's gain, or hides, at most this.
        hidden = 8 * jnp.finfo(scaled.dtype).eps * arrays.frobenius_norm(scaled, 1)
        gaps = jnp.where(jnp.all(direction == 0, axis=-1), 1, gaps)
        total, missed = jnp.sum(gains, axis=-1), jnp.sum(gaps * gains + hidden, axis=-1)
        gap = missed / arrays.nonzero_or_one(total)
        gap = jnp.where(jnp.all(direction == 0, axis=(-2, -1)), 1, gap)
        gap = jnp.where(jnp.all(scaled == 0, axis=(-2, -1)), 0, gap)
        direction = scale_of(norm.scale, grad.shape[-1:]) * direction
        return solvers.Steepest(direction, (), arrays.largest(residual, -1), gap)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        return self._row.retract(point, vector)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        return self._row.random_point(key, shape, dtype)

    def distance(self, point: Matrices) -> Numbers:
        return arrays.largest(self._row.distance(point), -1)

    @property
    def _row(self) -> Hypersphere:
        return Hypersphere(self.scale, retraction=self.retraction)
