"""Retractions of matrices with orthonormal columns."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices
from manifoldmuon._internal.matrices.lapack import positive_qr
from manifoldmuon._internal.matrices.polar import (
    inverse_sqrt_minus_one,
    largest_row_sum,
    polar_derivative,
)
from manifoldmuon.manifolds.retractions._retraction import Retraction


@dataclasses.dataclass(frozen=True)
class Polar(Retraction):
    """`(W + V) ((W + V)^T (W + V))^{-1/2}`, the orthonormal matrix nearest to `W + V`.

    Second order (Absil, Mahony and Sepulchre 2008, section 4.1). For a tangent `V` the Gram matrix
    is `I + V^T V`, at least the identity and close to it for a small step, so that a few `n x n`
    products find its inverse root: no iteration for a learning rate of 0.05, at most one up to 0.3,
    two for 1, and one more where the step has low rank. Using the Gram matrix of `W + V` itself
    removes any distance from the set that rounding has left in `W`.

    Steps longer than 10, which turn by 84 of 90 degrees, are shortened to at most 10, and to zero
    if their squares overflow. A row sum of the Gram matrix measures them; it can be too large by up
    to `n**(1/2)`.

    The iteration stops by itself; derivatives, in either mode, are of the exact factor.
    """

    order: ClassVar[float] = 2
    longest: ClassVar[float] = math.inf
    wide: ClassVar[bool] = True

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        new_point = point + vector
        gram = arrays.gram_matrix(new_point, new_point)
        largest = largest_row_sum(gram)  # at least ||W + V||^2
        largest = jnp.where(jnp.isnan(largest), jnp.inf, largest)  # squares that overflow

        def shorten(*_):
            new_point = point + vector * jnp.minimum(10 / (1 + jnp.sqrt(largest)), 1)
            return new_point, arrays.gram_matrix(new_point, new_point)

        same = new_point, gram
        new_point, gram = jax.lax.cond(jnp.any(largest > 81), shorten, lambda *same: same, *same)
        gram, largest = jax.lax.stop_gradient((gram, jnp.minimum(largest, 121)))
        return _polar_factor(new_point, gram, largest)


# A rank-deficient W + V, which has no unique polar factor, takes them all; steps up to 10 take ten.
_POLAR_ITERATIONS = 20


@jax.custom_jvp
def _polar_factor(new_point: Matrices, gram, largest) -> Matrices:
    # 1 <= eigenvalues <= largest row sum: scale the middle to 1, where the iteration converges
    # fastest. Scaled eigenvalues are at most 2, and it converges on (0, 7/3).
    inverse = 2 / (1 + largest)
    root = inverse_sqrt_minus_one(gram * inverse - arrays.identity_like(gram), _POLAR_ITERATIONS)
    # On accelerators the Gram matrix takes float32: its errors are a distance from the set. The
    # term added here is as small as the step.
    new_point = new_point + arrays.right_multiply(new_point, root, jax.lax.Precision.HIGH)
    return new_point * jnp.sqrt(inverse)


@_polar_factor.defjvp
def _polar_factor_jvp(primals, tangents):
    new_point, *_ = primals
    factor = _polar_factor(*primals)
    turned = polar_derivative(arrays.tall(new_point), arrays.tall(factor), arrays.tall(tangents[0]))
    return factor, arrays.match_orientation(turned, new_point)


@dataclasses.dataclass(frozen=True)
class QR(Retraction):
    """The orthonormal factor of `W + V = Q R`, with a positive diagonal in `R`.

    First order: unlike the polar factor it depends on the order of the columns, and turns the first
    column least (Absil, Mahony and Sepulchre 2008, example 4.1.3). Removes the distance of `W` from
    the set.
    """

    order: ClassVar[float] = 1
    longest: ClassVar[float] = 256.0

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        return positive_qr(point + vector)


@dataclasses.dataclass(frozen=True)
class Cayley(Retraction):
    """`(I - K/2)^{-1} (I + K/2) W` for the skew `K` with `K W = V`.

    `K = P V W^T - W V^T P` with `P = I - W W^T / 2` has rank at most 2n, so a single linear system
    of size 2n suffices (Wen and Yin 2013). A rotation of the whole space: it keeps the distance of
    `W` from the set. First order for the embedded metric on a non-square manifold, second order for
    the canonical metric.
    """

    order: ClassVar[float] = 1

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        inner = arrays.product(point.mT, vector)
        half = vector - arrays.product(point, inner) / 2  # P V
        left = jnp.concatenate([half, point], axis=-1)  # K = left right^T
        right = jnp.concatenate([point, -half], axis=-1)
        small = arrays.product(right.mT, left) / 2
        system = arrays.identity_like(small) - small
        solved = jnp.linalg.solve(system, arrays.product(right.mT, point))
        return point + arrays.product(left, solved)


@dataclasses.dataclass(frozen=True)
class Exponential(Retraction):
    """The geodesic of the embedded (Euclidean) metric, followed for time 1.

    `[W V] exp([[K, -S], [I, K]]) [I; 0] exp(-K)` with `K = W^T V` and `S = V^T V`: a matrix
    exponential of size 2n and another of size n (Edelman, Arias and Smith 1998, section 2.2.2).
    Differs from the geodesic of the canonical metric unless `K = 0` or `W` is square. The most
    expensive retraction, and the reference for the others; it keeps the distance of `W` from the
    set.
    """

    order: ClassVar[float] = math.inf
    longest: ClassVar[float] = 4.0

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        n = point.shape[-1]
        inner = arrays.skew(arrays.product(point.mT, vector))
        gram = arrays.product(vector.mT, vector)
        one = jnp.broadcast_to(arrays.identity_like(gram), gram.shape)
        block = jnp.block([[inner, -gram], [one, inner]])
        # For square W, S = -K^2, and the formula stays valid.
        columns = jax.scipy.linalg.expm(block)[..., :, :n]
        basis = jnp.concatenate([point, vector], axis=-1)
        return arrays.product(arrays.product(basis, columns), jax.scipy.linalg.expm(-inner))
