"""Estimates of singular values by products alone, for training steps."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares, Tall, Vectors
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.powers_of_two import to_unit_norm
from manifoldmuon._internal.meshes.mesh import match_varying_axes


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_eigenpair(gram: Squares, steps: int) -> tuple[Numbers, Vectors]:
    """Estimate the largest eigenvalue of S from below, and its unit vector, by Lanczos' method.

    The error falls at least with the square of the number of steps (with the number itself for
    power iteration: Kuczynski and Wozniakowski, SIAM J. Matrix Anal. Appl. 13, 1992). The start is
    a fixed random vector. S is positive semi-definite, of moderate size; a step is a product of S
    and a vector.

    Returns:
      `(<v, S v>, v)`. Derivatives assume a simple eigenvalue; v does not turn towards eigenvectors
      with the same eigenvalue up to rounding.
    """

    def step(carry, index):
        basis, vector, most = carry
        basis = jax.lax.dynamic_update_index_in_dim(basis, vector, index, -2)
        image = _apply(gram, vector)
        value = jnp.sum(vector * image, axis=-1)
        most = jnp.maximum(most, arrays.frobenius_norm(image, 1))
        for _ in range(2):  # otherwise rounding would decide the last digits
            image = image - _apply(basis.mT, _apply(basis, image))
        after = arrays.frobenius_norm(image, 1)
        # If S maps the basis into its span, only rounding errors remain: stop at zero.
        after = jnp.where(after > noise * most, after, 0)
        image = jnp.where(arrays.expand_trailing(after > 0, 1), image, 0)
        vector = image / arrays.expand_trailing(arrays.nonzero_or_one(after), 1)
        return (basis, vector, most), (value, after)

    steps = min(steps, gram.shape[-1])
    basis = jnp.zeros((*gram.shape[:-2], steps, gram.shape[-1]), gram.dtype)
    noise = 4 * jnp.finfo(gram.dtype).eps
    most = jnp.zeros(gram.shape[:-2], gram.dtype)
    carry = match_varying_axes((basis, start_vector(gram), most), gram)
    (basis, *_), tridiagonal = jax.lax.scan(step, carry, jnp.arange(steps))
    _, power = _tridiagonal_power(*tridiagonal)
    column = jnp.argmax(jnp.diagonal(power, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    weights = jnp.take_along_axis(power, column, axis=-1)[..., 0]
    vector = to_unit_norm(_apply(basis.mT, weights), 1)
    return arrays.inner_product(vector, _apply(gram, vector), 1), vector


@largest_eigenpair.defjvp
def _largest_eigenpair_jvp(steps, primals, tangents):
    """Return `<v, S' v>`, and v' with `(value - S) v' = S' v - v <v, S' v>` and `<v, v'> = 0`."""
    gram = primals[0]
    value, vector = largest_eigenpair(gram, steps)
    image = _apply(tangents[0], vector)
    slope = arrays.inner_product(vector, image, 1)
    values, basis = map_matrices(jnp.linalg.eigh, jax.lax.stop_gradient(gram))
    below = values[..., -1:] - values
    tied = ~(below > values[..., -1:] * gram.shape[-1] * jnp.finfo(gram.dtype).eps)
    over_gaps = jnp.where(tied, 0, 1 / jnp.where(tied, 1, below))

    def along(turn):
        return arrays.expand_trailing(arrays.inner_product(vector, turn, 1), 1) * vector

    def shifted(turn):  # along v, where `value - S` is singular, it multiplies by the value
        return arrays.expand_trailing(value, 1) * (turn + along(turn)) - _apply(gram, turn)

    def solve(_, right):
        inside = over_gaps * _apply(basis.mT, right)
        size = arrays.expand_trailing(arrays.nonzero_or_one(value), 1)
        return _apply(basis, inside) + along(right) / size

    right = image - arrays.expand_trailing(slope, 1) * vector
    turn = jax.lax.custom_linear_solve(shifted, right, solve, symmetric=True)
    return (value, vector), (slope, turn)


def _tridiagonal_power(
    values: Float[Array, "steps *batch"], lengths: Float[Array, "steps *batch"]
) -> tuple[Float[Array, "*batch steps steps"], Float[Array, "*batch steps steps"]]:
    """Return Lanczos' tridiagonal matrix, and a high power of it up to a factor.

    The power is the projection onto the eigenvector of the largest eigenvalue.
    """
    values, lengths = jnp.moveaxis(values, 0, -1), jnp.moveaxis(lengths, 0, -1)
    above = jnp.where(jnp.eye(values.shape[-1], k=1, dtype=bool), lengths[..., None], 0)
    small = arrays.identity_like(above) * values[..., None] + above + above.mT

    def square(_, power):
        power = power / arrays.nonzero_or_one(arrays.trace(power))[..., None, None]
        return arrays.product(power, power)

    return small, jax.lax.fori_loop(0, 20, square, small)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_eigenvalue(gram: Squares, steps: int) -> Numbers:
    """Return the eigenvalue of `largest_eigenpair`, up to rounding, with a third of the program.

    Without the vector there is no need to orthogonalise against all previous vectors: rounding then
    only repeats eigenvalues.
    """

    def step(carry, _):
        before, vector, link = carry
        image = _apply(gram, vector) - arrays.expand_trailing(link, 1) * before
        value = jnp.sum(vector * image, axis=-1)
        image = image - arrays.expand_trailing(value, 1) * vector
        after = arrays.frobenius_norm(image, 1)
        unit = image / arrays.expand_trailing(arrays.nonzero_or_one(after), 1)
        return (vector, unit, after), (value, after)

    start, zero = start_vector(gram), jnp.zeros(gram.shape[:-2], gram.dtype)
    carry = match_varying_axes((jnp.zeros_like(start), start, zero), gram)
    _, tridiagonal = jax.lax.scan(step, carry, length=min(steps, gram.shape[-1]))
    small, power = _tridiagonal_power(*tridiagonal)
    return arrays.inner_product(power, small) / arrays.nonzero_or_one(arrays.trace(power))


@largest_eigenvalue.defjvp
def _largest_eigenvalue_jvp(steps, primals, tangents):
    _, vector = largest_eigenpair(primals[0], steps)
    slope = arrays.inner_product(vector, _apply(tangents[0], vector), 1)
    return largest_eigenvalue(primals[0], steps), slope


def spectral_bound(x: Matrices) -> Numbers:
    """Return slightly more than `||x||_2`, for the price of a product: used to shorten steps.

    Adds 1 % to the largest eigenvalue of the Gram matrix, estimated by 24 steps of Lanczos' method.
    The estimate misses 0.3 % for eigenvalues evenly spread over [0, 1], and up to 0.9 % if a
    single eigenvalue exceeds the others by as much. Matrices are of moderate size.
    """
    high = arrays.tall(x)
    return arrays.safe_sqrt(1.01 * largest_eigenvalue(arrays.product(high.mT, high), 24))


def nuclear_parts(
    x: Matrices, polar: Matrices, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> tuple[Numbers, Numbers]:
    """Bound the nuclear norm, `||X||_* <= gained + missed`, by an approximate polar factor.

    A method of msign returns `A = U f V^T` with `f_i >= 0` close to 1 for `X = U S V^T`. Since
    `|1 - f| <= |1 - f**2|`,

    `||X||_* = <X, A> + sum s_i (1 - f_i) <= <X, A> + ||X - X A^T A||_*`,

    and the last nuclear norm is at most `sqrt(n)` times the Frobenius norm, with n the smaller
    side. The bound is tight up to rounding if the method has converged, and loose otherwise: for
    equal singular values and `f = 0.7` the loss is 0.3 and its bound 0.42.

    Returns:
      `(gained, missed)`: `<X, A>` and `sqrt(n) ||X - X A^T A||_F`, for an X of moderate size.
    """
    rest = x - arrays.right_multiply(x, arrays.gram_matrix(polar, polar, precision), precision)
    missed = math.sqrt(min(x.shape[-2:])) * arrays.frobenius_norm(rest)
    return arrays.inner_product(x, polar), missed


def _apply(matrix, vector):
    return jnp.matmul(matrix, vector[..., None], precision=jax.lax.Precision.HIGHEST)[..., 0]


def start_vector(matrix: Matrices) -> Vectors:
    """Return a random unit vector for every matrix, always the same for the same width."""
    vector = np.random.default_rng(0).standard_normal(matrix.shape[-1])
    vector = jnp.asarray(vector / np.linalg.norm(vector), matrix.dtype)
    return jnp.broadcast_to(vector, (*matrix.shape[:-2], matrix.shape[-1]))


def random_signs(width: int, count: int, dtype) -> Float[Array, "n k"]:
    """Return columns of random signs, always the same for the same shape.

    XLA on CPUs compiles kernels for products with a single column, but not with several.
    """
    return jnp.asarray(np.random.default_rng(0).choice((-1.0, 1.0), (width, count)), dtype)


def contraction_factor(gram: Squares, margin: float) -> Float[Array, "*batch 1 1"]:
    """Return `min(1, 1 / ||A||_2) / (1 + margin)` from `A^T A`, for an A of norm at most 1.2.

    Multiplies four vectors of random signs by a polynomial in `A^T A`, of degree 28, that is at
    most 1 on [0, 1] and grows fast beyond. Their Rayleigh quotient estimates the norm from below:
    by up to 0.5 % for a single singular value above 1 of 1024, wherever the others are, and 0.6 %
    for many values up to 1.2; the margin covers it. Lanczos is as accurate and faster, but compiles
    many more kernels.
    """

    def advance(_, carry):
        """Apply the recurrence of Chebyshev polynomials in `2 A^T A - I`, halved in each step."""
        before, vectors = carry
        return vectors, 2 * arrays.product(gram, vectors) - vectors - before / 4

    width = gram.shape[-1]
    # Polynomials of the third kind times `x^2`, so `x T_55(x)` of a singular value x. Without that
    # factor they would be 55 at 0, and hide a single large value among many zeros.
    start = arrays.product(gram, random_signs(width, 4, gram.dtype))
    carry = match_varying_axes((2 * start, start), gram)
    _, vectors = jax.lax.fori_loop(0, 27, advance, carry)
    pair = arrays.product(gram, vectors), vectors
    value, square = (arrays.trace(arrays.product(vectors.mT, x)) for x in pair)
    value = value / arrays.nonzero_or_one(square)
    return 1 / ((1 + margin) * jnp.sqrt(jnp.maximum(value, 1)))[..., None, None]


def pair_uncertainty(x: Tall, steps: int) -> Numbers:
    """Bound the sine of the angle between the computed and the true largest singular vector.

    The bound is the eigenpair's residual over the distance to the next eigenvalue (Davis and
    Kahan), and 1 if rounding or too few steps of Lanczos' method leave no distance.
    """
    x = jax.lax.stop_gradient(x)
    gram, width = arrays.product(x.mT, x), x.shape[-1]
    if width < 2:
        return jnp.zeros(gram.shape[:-2], gram.dtype)
    value, right = largest_eigenpair(gram, steps)
    most, column = arrays.nonzero_or_one(value), right[..., None]
    residual = arrays.product(gram, column) - arrays.expand_trailing(value, 2) * column
    error = arrays.frobenius_norm(residual) / most + 4 * float(jnp.finfo(gram.dtype).eps)
    rest = gram - arrays.expand_trailing(value, 2) * column * right[..., None, :]
    # Flip the axes for another start: in the pair's eigenspace the first start has no other part.
    after = largest_eigenvalue(jnp.flip(rest, (-2, -1)), steps) / most
    # A random start misses more only with probability 1e-3 (Kuczynski and Wozniakowski).
    missed = (math.log(1648 * math.sqrt(width)) / (2 * steps - 1)) ** 2
    apart = 1 - after - (missed if steps < width else 0)
    return jnp.where(apart > error, error / jnp.where(apart > error, apart, 1), 1)
