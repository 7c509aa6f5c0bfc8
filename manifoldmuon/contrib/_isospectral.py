"""Matrices with given singular values; steps rotate the singular vectors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from manifoldmuon._internal.arguments import check_axes, check_number, check_step_norm
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Tall, product, tall
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.rounding import at_any_scale, bounded_step, stay_if_still
from manifoldmuon._internal.scales import scale_of
from manifoldmuon.bounds import MatrixBounds, matrix_bounds
from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.solvers import Steepest, projected_direction
from manifoldmuon.norms import Frobenius, Spectral

_TIED = 1e-6  # singular values closer than this, relative to the largest, count as equal


@dataclasses.dataclass(frozen=True)
class Isospectral(Manifold):
    """Matrices `U diag(s) V^T` with given singular values s, and arbitrary singular vectors.

    Steps are two infinitesimal rotations, `A = X W + W Y` with skew X and Y, as in training by
    orthogonal equivalence (POET, arXiv:2506.08001). The retraction takes the nearest point.

    In the spectral norm the steepest direction has no known closed form. The direction is `msign`
    of the gradient's tangent part, made tangent and shortened to norm 1. Its gap is 0 if all
    singular values are equal and W is square, some 2 to 20 % otherwise, more if values nearly tie.
    Rounding decides the singular vectors of values closer than `3 sqrt(eps)` of the largest, and no
    step turns these vectors apart.

    Attributes:
      singular_values: descending from a positive number, as many as the matrix's smaller side.
      step_norm: norm of steps; None: the spectral norm relative to the largest singular value.

    Examples:
      >>> round(float(Isospectral((2.0, 1.0)).distance(jnp.diag(jnp.array([2.0, 1.0])))), 4)
      0.0
    """

    singular_values: tuple[float, ...]
    step_norm: Spectral | Frobenius | None = None
    ndim: ClassVar[int] = 2

    def __post_init__(self):
        name, values = "Isospectral.singular_values", self.singular_values
        if not isinstance(values, tuple) or not any(values) or list(values) != sorted(values)[::-1]:
            raise ValueError(f"{name} must be a tuple, descending from above 0; got {values!r}")
        for value in values:
            check_number(name, value, within="[0, inf)")
        check_step_norm(self, Spectral, Frobenius)

    @property
    def norm(self) -> Spectral | Frobenius:
        return Spectral(scale=self._largest) if self.step_norm is None else self.step_norm

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_axes(self, shape)
        if min(shape[-2:]) != len(self.singular_values):
            count = len(self.singular_values)
            raise ValueError(f"Isospectral has {count} singular values; got the shape {shape}")

    def project(self, point: Matrices) -> Matrices:
        """Replace the singular values (Mirsky 1960); LAPACK chooses the vectors of equal values."""
        return self._nearest(tall(scale_to_unit_exponent(point, 2)[0]), point)

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        tangent, *_ = self._projections(self._unit(point))
        part = at_any_scale(tangent, tall(vector), 2)
        return arrays.match_orientation(part, vector)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        unit = self._unit(point)
        tangent, beyond, magnified = self._projections(unit)
        direction, gap, residual = projected_direction(
            tall(grad), tangent, self.norm, magnified, beyond
        )
        gap = 0 * gap if unit.shape[-2:] == (1, 1) else gap  # nothing is tangent: zero is optimal
        direction = scale_of(self.norm.scale, grad.shape[-2:]) * direction
        direction = arrays.match_orientation(direction, grad)
        return Steepest(direction, (), residual, gap)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        step = tall(bounded_step(vector, self._largest, 256.0, 2))
        moved = self._nearest(self._unit(point) + step, point)
        return stay_if_still(point, vector, moved, 2)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        self.check_shape(shape)
        wide = jnp.promote_types(dtype, jnp.float32)
        return self.project(jax.random.normal(key, shape, wide)).astype(dtype)

    def distance(self, point: Matrices) -> Numbers:
        """Return the largest error of a singular value, relative to the largest singular value."""
        _, values, _ = _decomposed(self._unit(point), self.singular_values)
        wanted = _relative(self.singular_values, values.ndim, values.dtype)
        return arrays.largest(jnp.abs(values - wanted), -1)

    @property
    def _largest(self) -> float:
        return float(self.singular_values[0])

    def _projections(self, unit: Tall) -> tuple[Callable[[Tall], Tall], Any, float]:
        """Return the tangent projection, the one onto what it may miss, its condition."""
        left, _, right = _decomposed(unit, self.singular_values)
        # Vectors of values at distance d are known to eps / d: closer than `near` count as equal.
        near = max(_TIED, 3 * float(jnp.finfo(unit.dtype).eps) ** 0.5)
        values = _relative(self.singular_values, unit.ndim)
        tied, void, gone = _ties(values, near)
        apart = np.abs(np.swapaxes(np.append(values, 0 * values[..., :1], -1), -1, -2) - values)
        unsure = np.any((apart > _TIED) & (apart <= near), axis=-2, keepdims=True)
        pairs = unsure | np.swapaxes(unsure, -1, -2)

        def tangent(vector: Tall) -> Tall:
            return vector - _normal_part(left, right, vector, tied, void, gone)

        def dropped(vector: Tall) -> Tall:
            return _normal_part(left, right, vector, tied & pairs, void & pairs, gone & unsure)

        magnified = float(1 / np.min(apart, where=apart > near, initial=1.0))
        return tangent, dropped if unsure.any() else None, magnified

    def _unit(self, point: Matrices) -> Tall:
        return tall(arrays.upcast(point) / self._largest)

    def _nearest(self, x: Tall, like: Matrices) -> Matrices:
        left, _, right = _decomposed(x, self.singular_values)
        values = _relative(self.singular_values, left.ndim, left.dtype)
        unit = product(_polished(left) * values, _polished(right).mT)
        return (self._largest * arrays.match_orientation(unit, like)).astype(like.dtype)


def _relative(spectrum: tuple[float, ...], ndim: int, dtype: Any = np.float64) -> np.ndarray:
    """Return the singular values relative to the largest, with `ndim` axes."""
    return (np.asarray(spectrum) / spectrum[0]).reshape((1,) * (ndim - 1) + (-1,)).astype(dtype)


def _ties(values: np.ndarray, near: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which pairs of values are equal, which pairs are both 0, and which values are 0."""
    other, gone = np.swapaxes(values, -1, -2), values <= near
    return np.abs(values - other) <= near, gone & (other <= near), gone


def _normal_part(left: Tall, right: Matrices, vector: Tall, tied, void, gone) -> Tall:
    """Return the normal part of a vector in these blocks of the basis of singular vectors."""
    turned = product(vector, right)
    inner = product(left.mT, turned)
    outer = jnp.where(gone, turned - product(left, inner), 0)
    inner = jnp.where(void, inner, jnp.where(tied, arrays.sym(inner), 0))
    return product(product(left, inner) + outer, right.mT)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _decomposed(x: Tall, spectrum: tuple[float, ...]) -> tuple[Tall, Array, Matrices]:
    """Return `(U, s, V)`; differentiate only functions that ignore the basis within a tie.

    Within a tie of `spectrum` the singular vectors of both sides may turn together, for values of
    zero each side alone. The derivative leaves out these turns: it would be infinite.
    """
    left, values, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    return left, values, right.mT


@_decomposed.defjvp
def _decomposed_jvp(spectrum, primals, tangents):
    left, values, right = _decomposed(primals[0], spectrum)
    tied, void, gone = _ties(_relative(spectrum, left.ndim), _TIED)
    moved = product(tangents[0], right)
    inner = product(left.mT, moved)
    rows, columns = values[..., :, None], values[..., None, :]
    apart = arrays.skew(inner) / jnp.where(void, jnp.inf, rows + columns)
    together = arrays.sym(inner) / jnp.where(tied, jnp.inf, columns - rows)
    outside = (moved - product(left, inner)) / jnp.where(gone, jnp.inf, columns)
    slopes = jnp.diagonal(inner, axis1=-2, axis2=-1)
    turned = product(left, together + apart) + outside, slopes, product(right, together - apart)
    return (left, values, right), turned


def _polished(x: Tall) -> Tall:
    """Make LAPACK's columns orthonormal to rounding, by a Newton-Schulz step."""
    gram = product(x.mT, x)
    return product(x, 1.5 * arrays.identity_like(gram) - gram / 2)


@matrix_bounds.register
def bound_isospectral(space: Isospectral, shape: Any, drift: float = 0.0) -> MatrixBounds:
    """Bound points with singular values off by at most `drift` times the largest."""
    top, last = space.singular_values[0], space.singular_values[-1]
    most, least = top * (1 + drift), max(last - top * drift, 0.0)
    return MatrixBounds(most, most, least, least if shape[-2] <= shape[-1] else 0.0)
