"""Matrices with given singular values; steps rotate the singular vectors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_axes, check_step_norm
from manifoldmuon._internal.arrays import (
    Matrices,
    Numbers,
    Tall,
    identity_like,
    largest,
    match_orientation,
    product,
    skew,
    sym,
    tall,
    upcast,
)
from manifoldmuon._internal.directions import (
    at_any_scale,
    bounded_step,
    projected_direction,
    stay_if_still,
)
from manifoldmuon._internal.lapack import map_matrices, positive_qr
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.scales import scale_of
from manifoldmuon.bounds import MatrixBounds, matrix_bounds
from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.norms import Frobenius, Spectral

_TIED = 1e-6  # singular values closer than this, relative to the largest, count as equal


@dataclasses.dataclass(frozen=True)
class Isospectral(Manifold):
    """Matrices `U diag(s) V^T` with given singular values s, and arbitrary singular vectors.

    Steps are two infinitesimal rotations, `A = X W + W Y` with skew X and Y, as in training by
    orthogonal equivalence (POET, arXiv:2506.08001). In the basis of W's singular vectors, normal
    matrices are symmetric within each group of equal singular values, arbitrary where singular
    values are zero, and zero elsewhere; so the tangent projection takes an SVD of W.

    In the spectral norm the steepest direction has no known closed form: if all singular values
    differ, it maximises `<G, A>` over contractions with a zero diagonal. The direction is `msign`
    of the gradient's tangent part, made tangent and shortened to norm 1. Its gap bounds the share
    of the optimum that is missed: 0 if all singular values are equal and W is square, some 2 to
    20 % otherwise, more if values nearly tie. Rounding decides the singular vectors of values
    closer than `3 sqrt(eps)` of the largest, and no step turns these vectors apart.

    Attributes:
      singular_values: in descending order, the first positive; as many as the matrix's smaller
        side.
      step_norm: norm of steps, `Spectral` or `Frobenius`, used as given; None: the spectral norm
        relative to the largest singular value.

    Examples:
      >>> round(float(Isospectral((2.0, 1.0)).distance(jnp.diag(jnp.array([2.0, 1.0])))), 4)
      0.0
    """

    singular_values: tuple[float, ...]
    step_norm: Spectral | Frobenius | None = None
    ndim: ClassVar[int] = 2

    def __post_init__(self):
        values = self.singular_values
        real = isinstance(values, tuple) and all(
            isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in values
        )
        if not real:
            raise ValueError(
                "Isospectral.singular_values must be a tuple of finite numbers, none negative; got "
                f"{values!r}"
            )
        if any(x < y for x, y in itertools.pairwise(values)):
            raise ValueError(
                f"Isospectral.singular_values must fall from the largest on; got {values!r}: "
                "sort them, they stand for a set of matrices and for no order of columns"
            )
        if not values or values[0] == 0:
            raise ValueError(
                "Isospectral.singular_values must begin with a positive number; got "
                f"{values!r}. The zero matrix is alone on its set"
            )
        check_step_norm(self, Spectral, Frobenius)

    @classmethod
    def of(cls, weight: ArrayLike, step_norm: Spectral | Frobenius | None = None) -> "Isospectral":
        """Return the set of a given matrix, so that training keeps its singular values.

        Args:
          weight: a single concrete matrix, outside of `jax.jit`.
          step_norm: see the field.
        """
        if np.ndim(weight) != 2:
            raise ValueError(
                f"Isospectral.of takes one matrix; got the shape {np.shape(weight)}. The copies of "
                "a stack have one tuple of singular values together"
            )
        values = np.linalg.svd(np.asarray(weight, np.float64), compute_uv=False)
        return cls(tuple(float(x) for x in values), step_norm)

    @property
    def norm(self) -> Spectral | Frobenius:
        return Spectral(scale=self._largest) if self.step_norm is None else self.step_norm

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_axes(self, shape)
        if min(shape[-2:]) != len(self.singular_values):
            raise ValueError(
                f"a matrix of shape {tuple(shape[-2:])} has {min(shape[-2:])} singular values, and "
                f"Isospectral.singular_values are {len(self.singular_values)}"
            )

    def project(self, point: Matrices) -> Matrices:
        """Replace the singular values, in descending order (Mirsky 1960).

        If singular values of the matrix are equal, LAPACK chooses the singular vectors.
        """
        scaled, _ = scale_to_unit_exponent(point, 2)
        return self._like(self._nearest(tall(scaled)), point)

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        unit = self._unit(point)
        vectors, near = self._singular_vectors(unit), _nearly_tied(unit.dtype)
        part = at_any_scale(lambda v: self._tangent_part(*vectors, v, near), tall(vector), 2)
        return match_orientation(part, vector)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        unit, high = self._unit(point), tall(grad)
        left, right = self._singular_vectors(unit)

        near = _nearly_tied(unit.dtype)
        unsure, magnified = _resolved(self.singular_values, near)

        def tangent(vector):
            return self._tangent_part(left, right, vector, near)

        def beyond(vector):  # the part that may be tangent, but that `tangent` drops
            return self._tangent_part(left, right, vector, _TIED, unsure) - tangent(vector)

        direction, gap, residual = projected_direction(
            high, tangent, self.norm, magnified, beyond if unsure.any() else None
        )
        if unit.shape[-2:] == (1, 1):  # nothing is tangent: zero is optimal
            gap = 0 * gap
        size = scale_of(self.norm.scale, grad.shape[-2:])
        direction = match_orientation(size * direction, grad)
        return Steepest(direction, (), residual, gap).astype(grad.dtype)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        """Return the point of the set nearest to `W + V`: a second-order retraction without drift.

        Takes an SVD and keeps its singular vectors, re-orthonormalised on both sides.
        """
        moved = self._unit(point) + tall(bounded_step(vector, self._largest, 256.0, 2))
        return stay_if_still(point, vector, self._like(self._nearest(moved), point), 2)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        """Return a point with uniform (Haar) singular vectors on both sides."""
        self.check_shape(shape)
        *batch, m, n = shape
        wide = jnp.promote_types(dtype, jnp.float32)
        large, small = max(m, n), min(m, n)
        keys = jax.random.split(key)
        left = positive_qr(jax.random.normal(keys[0], (*batch, large, small), wide))
        right = positive_qr(jax.random.normal(keys[1], (*batch, small, small), wide))
        return self._like(self._assembled(left, right.mT), jnp.zeros(shape, dtype))

    def distance(self, point: Matrices) -> Numbers:
        """Return the largest error of a singular value, relative to the largest singular value."""
        values = map_matrices(lambda x: jnp.linalg.svd(x, compute_uv=False), self._unit(point))
        return largest(jnp.abs(values - self._values(values)), -1)

    @property
    def _largest(self) -> float:
        return float(self.singular_values[0])

    def _values(self, example: Float[Array, "*batch k"]) -> Float[Array, "*ones k"]:
        """Return the singular values relative to the largest, with the example's number of axes."""
        values = jnp.asarray(np.asarray(self.singular_values) / self._largest, example.dtype)
        return jnp.expand_dims(values, tuple(range(example.ndim - 1)))

    def _singular_vectors(self, x: Tall) -> tuple[Tall, Float[Array, "*batch q q"]]:
        """Return `(U, V)`, with columns in descending order of singular values."""
        left, _, right = _decomposed(x, self.singular_values)
        return left, right

    def _unit(self, point: Matrices) -> Tall:
        """Return the tall point or transpose, divided by the largest singular value."""
        return tall(upcast(point) / self._largest)

    def _like(self, unit: Tall, example: Matrices) -> Matrices:
        return (self._largest * match_orientation(unit, example)).astype(example.dtype)

    def _assembled(self, left: Tall, right: Float[Array, "*batch q q"]) -> Tall:
        return product(left * self._values(left), right)

    def _nearest(self, moved: Tall) -> Tall:
        left, right = self._singular_vectors(moved)
        return self._assembled(_polished(left), _polished(right).mT)

    def _tangent_part(
        self,
        left: Tall,
        right: Float[Array, "*batch q q"],
        vector: Tall,
        near: float,
        kept: np.ndarray | None = None,
    ) -> Tall:
        """Return the orthogonal projection, given the singular vectors of a tall point.

        Args:
          left: left singular vectors, as columns.
          right: right singular vectors, as columns.
          vector: tall matrix to project.
          near: singular values closer than this, relative to the largest, count as equal.
          kept: mask of singular values; everything in their singular vectors counts as tangent.
        """
        tied, gone, void = _ties(self.singular_values, vector.ndim, near)
        if kept is not None:
            known = ~kept
            tied, void = (x & known & known[:, None] for x in (tied, void))
            gone = gone & known
        turned = product(vector, right)
        inner = product(left.mT, turned)
        outer = turned - product(left, inner)
        inner = jnp.where(tied, skew(inner), inner)
        inner = jnp.where(void, 0, inner)
        outer = jnp.where(gone, 0, outer)
        return product(product(left, inner) + outer, right.mT)


def _nearly_tied(dtype) -> float:
    """Return the distance below which rounding mixes singular vectors by about sqrt(eps) or more.

    Singular vectors of values at distance d are known to eps / d. A direction that turned them
    apart would be tangent only to that accuracy.
    """
    return max(_TIED, 3 * float(jnp.finfo(dtype).eps) ** 0.5)


def _resolved(spectrum: tuple[float, ...], near: float) -> tuple[np.ndarray, float]:
    """Return which singular values nearly tie, and the inverse of the least distance over `near`.

    Distances are relative to the largest singular value and include distances from zero. Equal
    values do not nearly tie.
    """
    values = np.append(spectrum, 0.0) / spectrum[0]
    apart = np.abs(values[:, None] - values)
    unsure = np.any((apart > _TIED) & (apart <= near), axis=0)[:-1]
    return unsure, float(1 / np.min(apart, where=apart > near, initial=1.0))


def _ties(
    spectrum: tuple[float, ...], ndim: int, near: float = _TIED
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which pairs of singular values are equal, which are 0, and which pairs are both 0."""
    values = np.asarray(spectrum) / spectrum[0]
    values = values.reshape(*(1,) * (ndim - 1), -1)
    gone = values <= near
    return (
        np.abs(values - np.swapaxes(values, -1, -2)) <= near,
        gone,
        gone & np.swapaxes(gone, -1, -2),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _decomposed(
    x: Tall, spectrum: tuple[float, ...]
) -> tuple[Tall, Float[Array, "*batch q"], Float[Array, "*batch q q"]]:
    """Return `(U, s, V)`; differentiate only functions that ignore the basis within a tie.

    `spectrum` defines the ties. Within a tie the singular vectors of both sides may turn together,
    for values of zero each side alone. The derivative leaves out these turns: it would be infinite.
    """
    left, values, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    return left, values, right.mT


@_decomposed.defjvp
def _decomposed_jvp(spectrum, primals, tangents):
    left, values, right = _decomposed(primals[0], spectrum)
    tied, gone, void = _ties(spectrum, left.ndim)
    moved = product(tangents[0], right)
    inner = product(left.mT, moved)
    rows, columns = values[..., :, None], values[..., None, :]
    apart = skew(inner) / jnp.where(void, jnp.inf, rows + columns)
    together = sym(inner) / jnp.where(tied, jnp.inf, columns - rows)
    outside = (moved - product(left, inner)) / jnp.where(gone, jnp.inf, columns)
    slopes = jnp.diagonal(inner, axis1=-2, axis2=-1)
    turned = product(left, together + apart) + outside, slopes, product(right, together - apart)
    return (left, values, right), turned


def _polished(x: Tall) -> Tall:
    """Make LAPACK's columns orthonormal to rounding, by a Newton-Schulz step."""
    gram = product(x.mT, x)
    return product(x, 1.5 * identity_like(gram) - gram / 2)


@matrix_bounds.register
def isospectral_bounds(
    space: Isospectral, shape: tuple[int, ...], drift: float = 0.0
) -> MatrixBounds:
    """Bound points with singular values off by at most `drift` times the largest."""
    largest = space.singular_values[0]
    most, least = largest * (1 + drift), max(space.singular_values[-1] - largest * drift, 0.0)
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)
