"""The derivative of the polar factor, and the inverse square root of a matrix near the identity."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.matrices.arrays import Matrices, Squares, identity_like, product, sym
from manifoldmuon._internal.matrices.lapack import map_matrices


def polar_derivative(x: Matrices, factor: Matrices, tangent: Matrices) -> Matrices:
    """Return the derivative of the polar factor at `x = Q H` in the direction `E`.

    `Q A + (I - Q Q^T) E H^-1` with the skew A that solves `H A + A H = Q^T E - E^T Q` (Higham,
    Functions of Matrices, 2008, sec. 8.1, by differentiating `x = Q H`). Both equations are solved
    in the eigenbasis of H, but JAX differentiates them as linear equations, without derivatives of
    eigenvectors: higher derivatives are right as well.

    Matrices are tall or square, `factor` is Q and `tangent` E. If H is singular up to rounding, its
    pseudo-inverse is used: infinite terms become zero.
    """
    h = sym(product(factor.mT, x))
    basis = _eigenbasis(h, x.shape[-2])
    values, vectors, floor = basis
    over_values = _invert_above(values, floor)[..., None, :]

    def solve_leave(right):
        return product(product(right, vectors) * over_values, vectors.mT)

    along = product(factor.mT, tangent)
    turn = _solve_sum(h, along - along.mT, basis)
    leave = _linear_solve(lambda a: product(a, h), solve_leave, tangent - product(factor, along))
    return product(factor, turn) + leave


def solve_lyapunov(h: Squares, right: Squares) -> Squares:
    """Solve `H A + A H = B` for A, as a linear equation in JAX: derivatives of any order work.

    H is symmetric and positive semi-definite, B symmetric or skew. If a sum of two eigenvalues is
    zero up to rounding, the pseudo-inverse is used.
    """
    return _solve_sum(h, right, _eigenbasis(h, h.shape[-1]))


def _solve_sum(h, right, basis):
    values, vectors, floor = basis
    over_sums = _invert_above(values[..., :, None] + values[..., None, :], floor[..., None])

    def solve(right):
        inside = product(product(vectors.mT, right), vectors)
        return product(product(vectors, inside * over_sums), vectors.mT)

    return _linear_solve(lambda a: product(h, a) + product(a, h), solve, right)


def _eigenbasis(h, size):
    """Return eigenvalues, eigenvectors (neither differentiated) and the threshold for zero."""
    values, vectors = map_matrices(jnp.linalg.eigh, jax.lax.stop_gradient(h))
    return values, vectors, values[..., -1:] * size * jnp.finfo(h.dtype).eps


def _linear_solve(operator, solve, right):
    return jax.lax.custom_linear_solve(operator, right, lambda _, b: solve(b), symmetric=True)


def _invert_above(values, floor):
    """Return `1 / values` above the floor, and 0 elsewhere; NaN stays NaN."""
    keep = ~(values <= floor)
    return jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)


def polish(gram: Squares, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST) -> Squares:
    """Return the right factor that orthonormalises a nearly orthonormal `W` with this Gram matrix.

    It is a quintic Newton-Schulz step: its error is of the order of the cubed error of `W`.
    """
    return 15 / 8 * identity_like(gram) - 10 / 8 * gram + 3 / 8 * product(gram, gram, precision)


# Precision on accelerators. E comes from a product in float32, and later products multiply small
# matrices, so that their errors are small, too: three passes of bfloat16 for terms that grow with
# E.
_in_three_passes = functools.partial(product, precision=jax.lax.Precision.HIGH)


def largest_row_sum(x: Squares) -> Float[Array, "*batch 1 1"]:
    """Return the largest absolute row sum, a bound on the spectral norm of a symmetric matrix."""
    sums = jnp.sum(jnp.abs(x), axis=-2)  # columns, which take less time to compile on CPUs
    return jnp.max(sums, axis=-1, initial=0 if not sums.size else None)[..., None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def inverse_sqrt_minus_one(excess: Squares, max_iterations: int) -> Squares:
    """Return `(I + E)^{-1/2} - I` by products alone, accurate relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root; the product of the `p` converges to the root.
    Carrying `E`, `p - I` and `D = root - I` instead of `S`, `p` and the root keeps the identity
    out of the rounding errors: near the identity the result is three times as accurate. A small E
    takes a single product. The derivative, in either mode, is exact.

    E is symmetric, its eigenvalues between -1, which takes all iterations, and 4/3.
    """
    # The Taylor polynomial misses 5/16 E^3: 4e-8, or 1e-16 in float64.
    near = 5e-3 if excess.dtype == jnp.float32 else 7e-6

    def compose(left, right):
        """Return `(I + left) (I + right) - I`."""
        return left + right + _in_three_passes(left, right)

    def taylor(excess):
        square = _in_three_passes(excess, excess)
        return square, 0.375 * square - 0.5 * excess

    def unfinished(carry):
        # Row sums of E^2 bound the squared spectral norm of E, mostly at least twice as tightly as
        # row sums of E. A NaN compares false: only the other matrices decide when the loop ends.
        count, _, square, _, _ = carry
        return (count < max_iterations) & jnp.any(largest_row_sum(square) > near**2)

    def step(carry):
        count, excess, _, p, root = carry
        excess = compose(compose(excess, p), p)
        square, p = taylor(excess)
        return count + 1, excess, square, p, compose(root, p)

    # Training steps take no iteration, so the root starts with the first polynomial.
    square, p = taylor(excess)
    start = (jnp.zeros((), jnp.int32), excess, square, p, p)
    return jax.lax.while_loop(unfinished, step, start)[-1]


@inverse_sqrt_minus_one.defjvp
def _inverse_sqrt_minus_one_jvp(max_iterations, primals, tangents):
    """Solve `H R' + R' H = -R E' R` with `H = R^-1`: the derivative of `R S R = I`."""
    (excess,), (tangent,) = primals, tangents
    correction = inverse_sqrt_minus_one(excess, max_iterations)
    identity = identity_like(excess)
    inverse_root = identity + correction
    root = sym(product(identity + excess, inverse_root))
    turned = product(inverse_root, product(sym(tangent), inverse_root))
    return correction, solve_lyapunov(root, -turned)
