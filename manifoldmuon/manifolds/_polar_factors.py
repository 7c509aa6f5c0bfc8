"""Polar factors: the nearest orthonormal matrix, also in place of points far from the set."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.arrays import (
    Matrices,
    expand_trailing,
    frobenius_norm,
    gram_matrix,
    identity_like,
    match_orientation,
    nonzero_or_one,
    product,
    right_multiply,
    tall,
)
from manifoldmuon._internal.lapack import map_matrices
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.polar import polar_derivative, polish
from manifoldmuon._internal.spectral import start_vector
from manifoldmuon.linalg import SVD, msign
from manifoldmuon.manifolds._manifold import FAR


def nearest_orthonormal(x: Matrices) -> Matrices:
    """Return the orthonormal matrix nearest to a tall `x`.

    Uses singular vectors if `x` is too close to rank-deficient for products alone, and in float64,
    for which the default schedule is not made.
    """
    factor = msign(x, SVD() if x.dtype == jnp.float64 else None)
    gram = product(factor.mT, factor)
    error = jnp.max(jnp.abs(gram - identity_like(gram)), axis=(-2, -1), keepdims=True)
    lost = error > 1000 * jnp.finfo(x.dtype).eps

    def decomposed(x):
        left, _, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
        found = product(left, right)
        return product(found, polish(product(found.mT, found)))

    whole = jax.lax.cond(jnp.any(lost), decomposed, lambda _: factor, jax.lax.stop_gradient(x))
    return jnp.where(lost, whole, factor)


@jax.custom_jvp
def project_if_far(x: Matrices) -> Matrices:
    """Return the polar factor of each matrix farther than `FAR` from orthonormal, others unchanged.

    In training only `_is_far` costs time.

    Args:
      x: tall or wide, float32 or wider. NaN stays NaN.
    """
    if 0 in x.shape:
        return x
    far = _is_far(x)
    return jax.lax.cond(jnp.any(far), lambda x: _iterated(x, far), lambda x: x, x)


def _iterated(x: Matrices, far: Bool[Array, "*batch"]) -> Matrices:
    """Return the polar factor of the matrices marked as far.

    Singular values grow by 15/8 per step; float32 resolves them down to about 1e-6 of the largest.
    Noise of the size of rounding takes a rank-deficient matrix to an orthonormal matrix near one of
    its polar factors.
    """
    eps, (m, n) = float(jnp.finfo(x.dtype).eps), x.shape[-2:]
    noise = eps * jnp.sin(jnp.arange(1.0, m + 1)[:, None] * jnp.arange(1.0, n + 1)[None] ** 2)
    noise = jnp.expand_dims(noise.astype(x.dtype), tuple(range(x.ndim - 2)))

    def unfinished(carry):
        count, _, error = carry
        return (count < 128) & (error > eps ** (1 / 3))  # a step cubes the error

    def step(carry):
        count, old, _ = carry
        gram = gram_matrix(old, old)
        error = frobenius_norm(gram - identity_like(gram))
        return count + 1, right_multiply(old, polish(gram)), error

    def iterate(x, far):
        # Under `jax.vmap` this is always computed: near matrices then take no step.
        error = jnp.where(far, jnp.inf, 0).astype(x.dtype)
        return jax.lax.while_loop(unfinished, step, (jnp.int32(0), x, error))[1]

    def replace(i, stack):
        new = iterate(jax.lax.dynamic_index_in_dim(stack, i, keepdims=False), marks[i])
        return jax.lax.dynamic_update_index_in_dim(stack, new, i, 0)

    # To norm 1 at most, by two divisions: `largest * sqrt(m n)` can overflow.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    start = (x / nonzero_or_one(largest) + noise) / math.sqrt(m * n)
    start, marks = match_varying_axes((start.reshape((-1, m, n)), far.reshape(-1)), x)
    if len(start) == 1:
        found = iterate(start[0], marks[0])
    else:
        # A loop over matrices: this rarely runs, and TPU compilers unroll the products of a stack,
        # which took up to half of the compile time of a step.
        found = jax.lax.fori_loop(0, len(start), replace, start)
    return jnp.where(expand_trailing(far, 2), found.reshape(x.shape), x)


@project_if_far.defjvp
def project_if_far_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    found, far = project_if_far(x), _is_far(x)

    def moved(tangent):
        turned = match_orientation(polar_derivative(tall(x), tall(found), tall(tangent)), x)
        return jnp.where(expand_trailing(far, 2), turned, tangent)

    return found, jax.lax.cond(jnp.any(far), moved, lambda tangent: tangent, tangent)


def _is_far(x: Matrices) -> Bool[Array, "*batch"]:
    """Return whether a matrix is farther than about `FAR` from orthonormal: never below that.

    Computes `E^4 v` for a fixed random unit vector v, with `E = W^T W - I`, in eight matrix-vector
    products. Rounding to bfloat16 is below the limit. A single singular value that is off by d is
    detected for d above 0.01 or so; a large d is missed one time in 1e7.
    """
    high, exact = tall(x), jax.lax.Precision.HIGHEST

    def deviate(_, vector):
        # Without a transpose, which XLA on CPUs would materialise.
        moved = jnp.einsum("...mn,...n->...m", high, vector, precision=exact)
        return jnp.einsum("...m,...mn->...n", moved, high, precision=exact) - vector

    vector = jax.lax.fori_loop(0, 4, deviate, match_varying_axes(start_vector(high), high))
    # Not `>`: overflowing squares give infinity minus infinity, a NaN, which must count as far.
    return ~(jnp.sum(vector**2, axis=-1) <= (2 * FAR) ** 8)
