"""How large a weight may be: what its manifold says, or its value."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from manifoldmuon.manifolds import (
    DoublyStochastic,
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
    Isospectral,
    Orthogonal,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.modules import WeightSpec
from manifoldmuon.norms import (
    ConvRMSToRMS,
    FanRatio,
    Frobenius,
    Infinity,
    LongestRow,
    Spectral,
    scale_of,
)


@dataclasses.dataclass(frozen=True)
class MatrixBounds:
    """Bounds on matrices: on every one of a stack, a kernel's taps included.

    Attributes:
      spectral: the largest singular value is at most this.
      row: the Euclidean length of every row is at most this.
      least_singular: each singular value of a point of the manifold is at least this.
      least_row: and each row of it is at least as long as this.
    """

    spectral: float
    row: float
    least_singular: float = 0.0
    least_row: float = 0.0


@functools.singledispatch
def matrix_bounds(space: object, shape: tuple[int, ...]) -> MatrixBounds:
    """What holds for the points of a manifold, or for the weights of norm at most 1 in a norm.

    A generic function with one implementation for each type of manifold, and of the norms of
    steps (`Manifold.norm`). Flat space constrains nothing: there, points are taken to have norm
    at most 1. To teach it another manifold, or another norm, decorate a function of these
    arguments with `bounds.matrix_bounds.register`.

    Args:
      space: a manifold or a norm.
      shape: of the weight; its last two axes are the rows and columns of a matrix.

    Raises:
      TypeError: the type has no implementation.
    """
    raise TypeError(
        f"it is not known how large the points of {type(space).__name__} are: decorate a function "
        "(manifold, shape) -> bounds.MatrixBounds with @bounds.matrix_bounds.register"
    )


@matrix_bounds.register(Stiefel)
@matrix_bounds.register(Grassmann)
def _(space: Stiefel | Grassmann, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return MatrixBounds(scale, scale, scale, scale if shape[-2] <= shape[-1] else 0.0)


@matrix_bounds.register
def _(space: Orthogonal, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return MatrixBounds(scale, scale, scale, scale)


@matrix_bounds.register
def _(space: Isospectral, shape: tuple[int, ...]) -> MatrixBounds:
    most, least = space.singular_values[0], space.singular_values[-1]
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)


@matrix_bounds.register(SpectralSphere)
@matrix_bounds.register(SpectralBall)
def _(space: SpectralSphere | SpectralBall, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return MatrixBounds(scale, scale)


@matrix_bounds.register
def _(space: SpectralBand, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    most, least = space.high * scale, space.low * scale
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)


@matrix_bounds.register
def _(space: DoublyStochastic, shape: tuple[int, ...]) -> MatrixBounds:
    (m, n), total = shape[-2:], space.row_sum
    largest = min(total, total * m / n)  # of an entry
    return MatrixBounds(
        total * math.sqrt(m / n), math.sqrt(total * largest), 0.0, total / math.sqrt(n)
    )


@matrix_bounds.register
def _(space: Hypersphere, shape: tuple[int, ...]) -> MatrixBounds:
    radius = scale_of(space.scale, shape[len(shape) - space.ndim :])
    return _rows(radius, shape) if space.ndim == 1 else MatrixBounds(radius, radius)


@matrix_bounds.register
def _(space: EmbeddingRows, shape: tuple[int, ...]) -> MatrixBounds:
    return _rows(scale_of(space.scale, shape[-1:]), shape)


@matrix_bounds.register
def _(space: Euclidean, shape: tuple[int, ...]) -> MatrixBounds:
    return matrix_bounds(space.norm, shape)


@matrix_bounds.register
def _(space: Spectral, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return MatrixBounds(scale, scale)


@matrix_bounds.register
def _(space: ConvRMSToRMS, shape: tuple[int, ...]) -> MatrixBounds:
    return matrix_bounds(Spectral(scale=FanRatio(1 / math.prod(shape[-4:-2]))), shape)


@matrix_bounds.register
def _(space: LongestRow, shape: tuple[int, ...]) -> MatrixBounds:
    length = scale_of(space.scale, shape[-1:])
    return dataclasses.replace(_rows(length, shape), least_row=0.0)


@matrix_bounds.register
def _(space: Frobenius, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[len(shape) - space.ndim :])
    if space.ndim == 0:
        return MatrixBounds(scale * math.sqrt(shape[-2] * shape[-1]), scale * math.sqrt(shape[-1]))
    rows = dataclasses.replace(_rows(scale, shape), least_row=0.0)
    return rows if space.ndim == 1 else MatrixBounds(scale, scale)


@matrix_bounds.register
def _(space: Infinity, shape: tuple[int, ...]) -> MatrixBounds:
    return MatrixBounds(math.sqrt(shape[-2] * shape[-1]), math.sqrt(shape[-1]))


def _rows(length: float, shape: tuple[int, ...]) -> MatrixBounds:
    """Rows of one length, in any directions: all of them may be parallel."""
    return MatrixBounds(math.sqrt(shape[-2]) * length, length, 0.0, length)


ROUNDING = 1e-10
"""Relative to the largest: more than LAPACK's singular values in float64 may be wrong by."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """One weight of an architecture, or its copies in a stack; a leaf of trees.

    Attributes:
      spec: its manifold and its budget.
      value: its value in float64, in the manifold's layout; None where it may be anywhere on its
        manifold.
      radius: how far it may move from its value, in the modular norm.
      drift: how far it may be from its manifold, relative to the manifold's scale.
    """

    spec: WeightSpec
    value: np.ndarray | None
    radius: float
    drift: float

    def copy(self, index: int) -> "Weight":
        """One copy of a stack."""
        spec = dataclasses.replace(self.spec, budget=np.asarray(self.spec.budget[index]))
        value = None if self.value is None else self.value[index]
        return dataclasses.replace(self, spec=spec, value=value)

    def stretch(self, shape: tuple[int, ...], apart: bool = False) -> tuple[float, float]:
        """Of its matrices: the sum of their spectral norms, and the smallest singular value.

        Of matrices that act apart, on entries of their own, the largest norm and not the sum.
        """
        taps = 1 if apart else math.prod(shape[:-2])
        if self.value is None:
            known = matrix_bounds(self.spec.manifold, shape)
            return self._drifted(taps * known.spectral, known.least_singular)
        values = np.linalg.svd(self.value, compute_uv=False)
        step = self.radius * self.step_stretch(shape, apart)
        norms = values[..., 0]
        most = norms.max() if apart else norms.sum()
        return _rounded(most + step, values[..., -1].min() - step)

    def rows(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """The length of the longest row and of the shortest."""
        if self.value is None:
            known = matrix_bounds(self.spec.manifold, shape)
            return self._drifted(known.row, known.least_row)
        lengths = np.linalg.norm(self.value, axis=-1)
        step = self.radius * self.step_rows(shape)
        return _rounded(lengths.max() + step, lengths.min() - step)

    def step_stretch(self, shape: tuple[int, ...], apart: bool = False) -> float:
        """The sum of its matrices' spectral norms, of a step of modular norm 1, or the largest."""
        budget = float(self.spec.budget)
        taps = 1 if apart else math.prod(shape[:-2])
        return taps * budget * self._unit_step(shape).spectral if budget else 0.0

    def step_rows(self, shape: tuple[int, ...]) -> float:
        """The length of the longest row of such a step."""
        budget = float(self.spec.budget)
        return budget * self._unit_step(shape).row if budget else 0.0

    def _unit_step(self, shape: tuple[int, ...]) -> MatrixBounds:
        """Of steps of norm 1, whose norm need not be that of the manifold's points."""
        return matrix_bounds(self.spec.manifold.norm, shape)

    def _drifted(self, most: float, least: float) -> tuple[float, float]:
        return most * (1 + self.drift), max(least * (1 - self.drift), 0.0)


def weight_of(spec: WeightSpec, value: Any, radius: float, drift: float) -> Weight:
    """A weight with its value, or on its manifold if that is None.

    Raises:
      ValueError: the value is not finite.
    """
    if value is None:
        return Weight(spec, None, radius, drift)
    array = np.asarray(value).astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"a weight on {type(spec.manifold).__name__} is not finite")
    return Weight(spec, spec.inward(array), radius, drift)


def _rounded(most: float, least: float) -> tuple[float, float]:
    slack = ROUNDING * most
    return float(most + slack), float(max(least - slack, 0.0))
