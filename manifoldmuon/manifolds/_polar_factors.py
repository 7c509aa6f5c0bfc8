"""The nearest orthonormal matrix, and a cheap test of how near it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.matrices.arrays import Matrices, identity_like, product, tall, trace
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.polar import polish
from manifoldmuon._internal.matrices.spectral import random_signs
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.linalg import SVD, msign


def nearest_orthonormal(x: Matrices) -> Matrices:
    """Return the orthonormal matrix nearest to a tall `x`.

    Uses singular vectors if `x` is too close to rank-deficient for a single `msign`, and in
    float64, for which the default schedule is not made.
    """
    factor = msign(x, SVD() if x.dtype == jnp.float64 else None)
    gram = product(factor.mT, factor)
    error = jnp.max(jnp.abs(gram - identity_like(gram)), axis=(-2, -1), keepdims=True)
    lost = error > 1000 * jnp.finfo(x.dtype).eps

    def decomposed(x):
        # The compiler for TPUs takes minutes for the singular vectors of a 512 x 512 matrix.
        polar = jax.lax.platform_dependent(x, tpu=polar_by_products, default=_polar_by_svd)
        return product(polar, polish(product(polar.mT, polar)))

    whole = jax.lax.cond(jnp.any(lost), decomposed, lambda _: factor, jax.lax.stop_gradient(x))
    return jnp.where(lost, whole, factor)


def _polar_by_svd(x: Matrices) -> Matrices:
    left, _, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    return product(left, right)


def polar_by_products(x: Matrices) -> Matrices:
    """Return an orthonormal matrix nearest to a tall `x` up to rounding, whatever its rank.

    Every `msign` multiplies small singular values by a thousand or more. Random numbers of the size
    of rounding fill the null space; smaller numbers may be rounded away.
    """

    def amplify(i, x):
        # New numbers in every iteration; constants would be computed by the compiler, in minutes.
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), x.shape[-2:], x.dtype)
        return msign(x + 4 * jnp.finfo(x.dtype).eps * jnp.broadcast_to(noise, x.shape))

    return jax.lax.fori_loop(0, 4, amplify, x)


def exceeds_distance(x: Matrices, *distances: float) -> list[Bool[Array, "*batch"]]:
    """Return whether a matrix is farther than about each distance from orthonormal.

    Computes `E^4 V` for two columns V of fixed random signs, with `E = W^T W - I`, in eight thin
    products: an estimate from below. For a distance of 0.005, rounding to bfloat16 is below the
    limit, and a single singular value that is off by d is detected for d above 0.01 or so. A NaN is
    farther.

    Args:
      x: tall or wide, float32 or wider.
      *distances: limits on the largest `|sigma - 1|`.
    """
    high = tall(x)

    def deviate(_, rows):
        # Without a transpose of `high`, which XLA on CPUs would materialise.
        return rows - product(product(high, rows.mT).mT, high)

    signs = random_signs(high.shape[-1], 2, high.dtype).mT
    rows = jnp.broadcast_to(signs, (*high.shape[:-2], *signs.shape))
    rows = jax.lax.fori_loop(0, 4, deviate, match_varying_axes(rows, high))
    # XLA on CPUs compiles the trace of a product faster than a sum of squares.
    size = trace(product(rows, rows.mT)) / max(signs.size, 1)
    # Not `>`: overflowing squares give infinity minus infinity, a NaN, which must count as far.
    return [~(size <= (2 * distance) ** 8) for distance in distances]
