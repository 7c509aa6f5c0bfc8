"""How large a weight may be: what its manifold says, or its value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import numpy as np

from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Hypersphere,
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
    MaxAbs,
    MaxRowNorm,
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
def matrix_bounds(space: object, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    """Bound the points of a manifold, or the weights of norm at most 1 in a norm.

    A generic function with one implementation for each type of manifold, and of the norms of
    steps (`Manifold.norm`). Flat space constrains nothing: there, points are taken to have norm
    at most 1. To teach it another manifold, or another norm, decorate a function of these
    arguments with `bounds.matrix_bounds.register`; one that is never asked about drift may leave
    that argument out.

    Args:
      space: a manifold or a norm.
      shape: of the weight; its last two axes are the rows and columns of a matrix.
      drift: bounds for all matrices whose `Manifold.distance` is at most this. Norms and flat
        space ignore it.

    Raises:
      TypeError: the type has no implementation.
    """
    raise TypeError(
        f"it is not known how large the points of {type(space).__name__} are: decorate a function "
        "(manifold, shape, drift) -> bounds.MatrixBounds with @bounds.matrix_bounds.register"
    )


@matrix_bounds.register(Stiefel)
@matrix_bounds.register(Orthogonal)
@matrix_bounds.register(Grassmann)
def _(
    space: Stiefel | Orthogonal | Grassmann, shape: tuple[int, ...], drift: float = 0.0
) -> MatrixBounds:
    return _between(1 - drift, 1 + drift, scale_of(space.scale, shape[-2:]), shape)


@matrix_bounds.register(SpectralSphere)
@matrix_bounds.register(SpectralBall)
def _(
    space: SpectralSphere | SpectralBall, shape: tuple[int, ...], drift: float = 0.0
) -> MatrixBounds:
    return _between(0.0, 1 + drift, scale_of(space.scale, shape[-2:]), shape)


@matrix_bounds.register
def _(space: SpectralBand, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return _between(space.low - drift, space.high + drift, scale, shape)


@matrix_bounds.register
def _(space: Hypersphere, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    radius = scale_of(space.scale, shape[len(shape) - space.ndim :])
    most = radius * (1 + drift)
    return _rows(radius, shape, drift) if space.ndim == 1 else MatrixBounds(most, most)


@matrix_bounds.register
def _(space: EmbeddingRows, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    return _rows(scale_of(space.scale, shape[-1:]), shape, drift)


@matrix_bounds.register
def _(space: Euclidean, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    return matrix_bounds(space.norm, shape)


@matrix_bounds.register
def _(space: Spectral, shape: tuple[int, ...]) -> MatrixBounds:
    scale = scale_of(space.scale, shape[-2:])
    return MatrixBounds(scale, scale)


@matrix_bounds.register
def _(space: ConvRMSToRMS, shape: tuple[int, ...]) -> MatrixBounds:
    return matrix_bounds(Spectral(scale=FanRatio(1 / math.prod(shape[-4:-2]))), shape)


@matrix_bounds.register
def _(space: MaxRowNorm, shape: tuple[int, ...]) -> MatrixBounds:
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
def _(space: MaxAbs, shape: tuple[int, ...]) -> MatrixBounds:
    return MatrixBounds(math.sqrt(shape[-2] * shape[-1]), math.sqrt(shape[-1]))


def _between(least: float, most: float, scale: float, shape: tuple[int, ...]) -> MatrixBounds:
    """Singular values between two numbers, in units of the scale."""
    least, most = scale * max(least, 0.0), scale * most
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)


def _rows(length: float, shape: tuple[int, ...], drift: float = 0.0) -> MatrixBounds:
    """Rows of about one length, in any directions: all of them may be parallel."""
    most = length * (1 + drift)
    return MatrixBounds(math.sqrt(shape[-2]) * most, most, 0.0, length * max(1 - drift, 0.0))


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
      drift: how far it may be from its manifold, by the manifold's own `distance`.
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

    def spectral_norm(self, shape: tuple[int, ...], blockwise: bool = False) -> tuple[float, float]:
        """Of its matrices: the sum of their spectral norms, and the smallest singular value.

        Of matrices that act blockwise, on entries of their own, the largest norm and not the sum.
        """
        taps = 1 if blockwise else math.prod(shape[:-2])
        if self.value is None:
            known = self._anywhere(shape)
            return taps * known.spectral, known.least_singular
        values = np.linalg.svd(self.value, compute_uv=False)
        step = self.radius * self.step_norm(shape, blockwise)
        norms = values[..., 0]
        most = norms.max() if blockwise else norms.sum()
        return _rounded(most + step, values[..., -1].min() - step)

    def rows(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """The length of the longest row and of the shortest."""
        if self.value is None:
            known = self._anywhere(shape)
            return known.row, known.least_row
        lengths = np.linalg.norm(self.value, axis=-1)
        step = self.radius * self.step_rows(shape)
        return _rounded(lengths.max() + step, lengths.min() - step)

    def step_norm(self, shape: tuple[int, ...], blockwise: bool = False) -> float:
        """The sum of its matrices' spectral norms, of a step of modular norm 1, or the largest."""
        budget = float(self.spec.budget)
        taps = 1 if blockwise else math.prod(shape[:-2])
        return taps * budget * self._unit_step(shape).spectral if budget else 0.0

    def step_rows(self, shape: tuple[int, ...]) -> float:
        """The length of the longest row of such a step."""
        budget = float(self.spec.budget)
        return budget * self._unit_step(shape).row if budget else 0.0

    def _unit_step(self, shape: tuple[int, ...]) -> MatrixBounds:
        """Of steps of norm 1, whose norm need not be that of the manifold's points."""
        return matrix_bounds(self.spec.manifold.norm, shape)

    def _anywhere(self, shape: tuple[int, ...]) -> MatrixBounds:
        """Of all weights within `drift` of the manifold."""
        space = self.spec.manifold
        if not self.drift:
            return matrix_bounds(space, shape)
        rule = matrix_bounds.dispatch(type(space))
        if len(inspect.signature(rule).parameters) < 3:
            raise TypeError(
                f"the bounds of {type(space).__name__} hold on its set alone: for drift, register "
                "a function (manifold, shape, drift) with @bounds.matrix_bounds.register"
            )
        return rule(space, shape, self.drift)


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
