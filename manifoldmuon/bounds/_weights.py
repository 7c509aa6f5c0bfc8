"""Bounds on weights, from their manifolds or from their values."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any

import numpy as np

from manifoldmuon._internal.arguments import check_number, checked, finite_array, number
from manifoldmuon._internal.scales import scale_of
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.modules import WeightSpec
from manifoldmuon.norms import ConvRMSToRMS, FanRatio, Frobenius, MaxAbs, MaxRowNorm, Spectral

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixBounds:
    """Bounds on every matrix of a stack; the taps of a kernel count as a stack.

    Attributes:
      spectral: upper bound on the singular values.
      row: upper bound on the Euclidean lengths of rows.
      least_singular: lower bound on the singular values of a point of the manifold.
      least_row: lower bound on the lengths of its rows.
    """

    spectral: float
    row: float
    least_singular: float = 0.0
    least_row: float = 0.0


def _check_shape(name: str, shape: Shape) -> None:
    check_number(f"{name}: its length", len(shape), within="[2, inf)")


@checked
@functools.singledispatch
def matrix_bounds(
    space: object,
    shape: Annotated[Shape, _check_shape],
    drift: Annotated[float, number("[0, inf)")] = 0.0,
) -> MatrixBounds:
    """Bound the points of a manifold, or the unit ball of a norm.

    A generic function with an implementation for each type of manifold and for each norm of steps
    (`Manifold.norm`). Flat space has no constraint: its points are assumed to have norm at most 1.
    To add a manifold or a norm, decorate a function of these arguments with
    `bounds.matrix_bounds.register`; omit `drift` if you never use it.

    Args:
      space: a manifold or a norm.
      shape: shape of the weight; its last two axes are the rows and columns of a matrix.
      drift: bound all matrices of `Manifold.distance` at most `drift`. Flat space ignores it, and
        norms do not take it.

    Examples:
      >>> matrix_bounds(mm.manifolds.Stiefel(2.0), (3, 5))
      MatrixBounds(spectral=2.0, row=2.0, least_singular=2.0, least_row=2.0)
    """
    raise TypeError(
        f"no bound is registered for {type(space).__name__}: decorate a function (manifold, shape, "
        "drift) -> bounds.MatrixBounds with @bounds.matrix_bounds.register, as on the page 'Bounds'"
    )


@matrix_bounds.register(Stiefel)
@matrix_bounds.register(Grassmann)
def bound_frames(space: Any, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    return _between(1 - drift, 1 + drift, space, shape)


@matrix_bounds.register(SpectralSphere)
@matrix_bounds.register(SpectralBall)
def bound_spectral_ball(space: Any, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    return _between(0.0, 1 + drift, space, shape)


@matrix_bounds.register
def bound_spectral_band(space: SpectralBand, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    return _between(space.low - drift, space.high + drift, space, shape)


@matrix_bounds.register
def bound_hypersphere(space: Hypersphere, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    radius = scale_of(space.scale, shape[len(shape) - space.ndim :])
    most = radius * (1 + drift)
    return _rows(radius * (1 - drift), most, shape) if space.ndim == 1 else MatrixBounds(most, most)


@matrix_bounds.register
def bound_embedding_rows(space: EmbeddingRows, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    radius = scale_of(space.scale, shape[-1:])
    return _rows(radius * (1 - drift), radius * (1 + drift), shape)


@matrix_bounds.register
def bound_flat_space(space: Euclidean, shape: Shape, drift: float = 0.0) -> MatrixBounds:
    return matrix_bounds(space.norm, shape)


@matrix_bounds.register
def bound_spectral(norm: Spectral, shape: Shape) -> MatrixBounds:
    scale = scale_of(norm.scale, shape[-2:])
    return MatrixBounds(scale, scale)


@matrix_bounds.register
def bound_conv_rms_to_rms(norm: ConvRMSToRMS, shape: Shape) -> MatrixBounds:
    return bound_spectral(Spectral(scale=FanRatio(1 / math.prod(shape[-norm.ndim : -2]))), shape)


@matrix_bounds.register
def bound_max_row_norm(norm: MaxRowNorm, shape: Shape) -> MatrixBounds:
    return _rows(0.0, scale_of(norm.scale, shape[-1:]), shape)


@matrix_bounds.register
def bound_frobenius(norm: Frobenius, shape: Shape) -> MatrixBounds:
    scale = scale_of(norm.scale, shape[len(shape) - norm.ndim :])
    if norm.ndim == 1:
        return _rows(0.0, scale, shape)
    rows, columns = shape[-2:] if norm.ndim == 0 else (1, 1)
    return MatrixBounds(scale * math.sqrt(rows * columns), scale * math.sqrt(columns))


@matrix_bounds.register
def bound_max_abs(norm: MaxAbs, shape: Shape) -> MatrixBounds:
    return bound_frobenius(Frobenius(ndim=0), shape)


def _between(least: float, most: float, space: Any, shape: Shape) -> MatrixBounds:
    """Return bounds from the least and largest singular value, in units of the manifold's scale."""
    scale = scale_of(space.scale, shape[-2:])
    least, most = scale * max(least, 0.0), scale * most
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)


def _rows(least: float, most: float, shape: Shape) -> MatrixBounds:
    """Return bounds from the least and largest row length; rows may all be parallel."""
    return MatrixBounds(math.sqrt(shape[-2]) * most, most, 0.0, max(least, 0.0))


ROUNDING = 1e-10
"""Upper bound on LAPACK's errors of float64 singular values, relative to the largest value."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightRegion:
    """One weight of an architecture, or its copies in a stack; a leaf of trees.

    Attributes:
      spec: its manifold and budget.
      value: float64 array in the manifold's layout; None for any point of the manifold.
      radius: the largest distance from `value`, in the modular norm.
      drift: the largest distance from the manifold, by the manifold's own `distance`.
    """

    spec: WeightSpec
    value: np.ndarray | None
    radius: float
    drift: float

    def copy(self, index: int) -> "WeightRegion":
        """Return the weight of a single copy of a stack."""
        if (value := self.value) is not None:
            self.expect_shape((len(self.spec.budget), *value.shape[1:]))
            value = value[index]
        return dataclasses.replace(self.with_budget(self.spec.budget[index]), value=value)

    def with_budget(self, budget: Any) -> "WeightRegion":
        """Return the same weight in another modular norm."""
        return dataclasses.replace(
            self, spec=dataclasses.replace(self.spec, budget=np.asarray(budget))
        )

    def expect_shape(self, shape: Shape) -> None:
        """Raise `ValueError` if the value has another shape."""
        if self.value is not None and self.value.shape != shape:
            raise ValueError(f"expected a weight of the shape {shape}; got {self.value.shape}")

    def spectral_norm(self, shape: Shape, blockwise: bool = False) -> tuple[float, float]:
        """Return the sum of the matrices' spectral norms, and their smallest singular value.

        If `blockwise`, the matrices act on separate entries: return the largest norm, not the sum.
        """
        if self.value is None:
            known = self._anywhere(shape)
            return _tap_count(shape, blockwise) * known.spectral, known.least_singular
        values = np.linalg.svd(self.value, compute_uv=False)
        step = self.radius * self.step_norm(shape, blockwise)
        norms = values[..., 0]
        most = norms.max() if blockwise else norms.sum()
        return _rounded(most + step, values[..., -1].min() - step)

    def rows(self, shape: Shape) -> tuple[float, float]:
        """Return the lengths of the longest and the shortest row."""
        if self.value is None:
            known = self._anywhere(shape)
            return known.row, known.least_row
        lengths = np.hypot.reduce(self.value, axis=-1, initial=0.0)  # squares may underflow
        step = self.radius * self.step_rows(shape)
        return _rounded(lengths.max() + step, lengths.min() - step)

    def step_norm(self, shape: Shape, blockwise: bool = False) -> float:
        """Return `spectral_norm` of a step of modular norm 1."""
        return _tap_count(shape, blockwise) * self._step(shape).spectral

    def step_rows(self, shape: Shape) -> float:
        """Return the length of the longest row of a step of modular norm 1."""
        return self._step(shape).row

    def _step(self, shape: Shape) -> MatrixBounds:
        """Return bounds on steps of modular norm 1, in the norm of the manifold's steps."""
        budget = float(self.spec.budget)
        if not budget:
            return MatrixBounds(0.0, 0.0)
        unit = matrix_bounds(self.spec.manifold.norm, shape)
        return MatrixBounds(budget * unit.spectral, budget * unit.row)

    def _anywhere(self, shape: Shape) -> MatrixBounds:
        """Return bounds on all weights within `drift` of the manifold."""
        space, drift = self.spec.manifold, (self.drift,) if self.drift else ()
        return matrix_bounds(space, shape, *drift)


def _tap_count(shape: Shape, blockwise: bool) -> int:
    return 1 if blockwise else math.prod(shape[:-2])


def weight_of(spec: WeightSpec, value: Any = None, *, radius: float, drift: float) -> WeightRegion:
    """Return a weight with this value, or any point of its manifold if `value` is None."""
    if value is None:
        return WeightRegion(spec, None, radius, drift)
    array = finite_array(f"a weight on {type(spec.manifold).__name__}", value)
    return WeightRegion(spec, spec.inward(array), radius, drift)


def _rounded(most: float, least: float) -> tuple[float, float]:
    slack = ROUNDING * most
    return float(most + slack), float(max(least - slack, 0.0))
