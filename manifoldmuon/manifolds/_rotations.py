"""Rotations: orthogonal matrices of determinant +1, the special orthogonal group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.polar import polar_derivative
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon.manifolds._stiefel import Orthogonal, nearest_orthonormal


@dataclasses.dataclass(frozen=True)
class Rotations(Orthogonal):
    """Square matrices `W^T W = s^2 I` of positive determinant: half of `Orthogonal`.

    Tangent space, steepest direction and retractions are inherited from `Orthogonal`: a step of any
    length keeps the determinant, since `det(I + K) > 0` for skew K. A point of negative determinant
    is replaced by the nearest rotation, found from the singular vectors of its smallest singular
    value (Kabsch 1976). Every method that takes or returns a point computes a determinant.

    The fields are inherited from `Stiefel`.
    """

    def project(self, point: arrays.Squares) -> arrays.Squares:
        """Return the nearest rotation; if the smallest singular values tie, it is not unique."""
        if 0 in point.shape:
            return point
        scaled, _ = scale_to_unit_exponent(point, 2)
        return (self._scale(point) * _nearest_rotation(scaled)).astype(point.dtype)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> arrays.Squares:
        """Return a uniform (Haar-distributed) rotation."""
        point = super().random_point(key, shape, dtype)
        sign = jnp.where(_is_mirrored(point), -1, 1).astype(point.dtype)
        return point.at[..., :1].multiply(arrays.expand_trailing(sign, 2))

    def distance(self, point: arrays.Squares) -> arrays.Numbers:
        """Return the largest `|sigma_i / scale - 1|`, and at least 2 for a negative determinant."""
        mirrored = jnp.where(_is_mirrored(point), 2.0, 0.0)
        return jnp.maximum(distance := super().distance(point), mirrored.astype(distance.dtype))

    def _unit(self, point: arrays.Squares) -> arrays.Squares:
        mirrored = _is_mirrored(point)

        def nearest(point: Array) -> Array:
            return jnp.where(arrays.expand_trailing(mirrored, 2), self.project(point), point)

        return super()._unit(jax.lax.cond(jnp.any(mirrored), nearest, lambda point: point, point))


@jax.custom_jvp
def _nearest_rotation(x: arrays.Squares) -> arrays.Squares:
    factor = nearest_orthonormal(x)
    mirrored = _is_mirrored(factor)

    def turn(factor: Array) -> Array:
        stretch = arrays.product(factor.mT, x)
        vectors = map_matrices(lambda x: jnp.linalg.eigh(x)[1], stretch + stretch.mT)
        last = vectors[..., :, :1]
        turned = factor - 2 * arrays.product(arrays.product(factor, last), last.mT)
        return jnp.where(arrays.expand_trailing(mirrored, 2), turned, factor)

    return jax.lax.cond(jnp.any(mirrored), turn, lambda factor: factor, factor)


@_nearest_rotation.defjvp
def _nearest_rotation_jvp(primals, tangents):
    # The equation of the polar factor holds, with a negative smallest eigenvalue if it was turned.
    (x,), (tangent,) = primals, tangents
    rotation = _nearest_rotation(x)
    return rotation, polar_derivative(x, rotation, tangent)


def _is_mirrored(point: arrays.Squares) -> Bool[Array, "*batch"]:
    scaled, _ = scale_to_unit_exponent(point, 2)
    return map_matrices(jnp.linalg.det, jax.lax.stop_gradient(scaled)) < 0
