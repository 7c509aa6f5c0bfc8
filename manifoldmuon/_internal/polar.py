"""The derivative of the polar factor, and the inverse root of a matrix near the identity."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import Matrices, Squares, identity_like, product, sym
from manifoldmuon._internal.lapack import map_matrices


def polar_derivative(x: Matrices, factor: Matrices, tangent: Matrices) -> Matrices:
    """The derivative of the polar factor at `x = Q H` in the direction `E`.

    `Q A + (I - Q Q^T) E H^-1` with the skew A that solves `H A + A H = Q^T E - E^T Q` (Higham,
    Functions of Matrices, 2008, sec. 8.1, by differentiating `x = Q H`). Both equations are
    solved in the eigenbasis of H, but are given to JAX as linear equations: their own derivative
    needs no derivative of the eigenvectors, so that higher derivatives are right as well.

    Args:
      x: tall or square.
      factor: Q, its polar factor.
      tangent: E.

    Returns:
      The derivative. Where H is singular to rounding the pseudo-inverse stands in: what would
      be infinite contributes zero.
    """
    h = sym(product(factor.mT, x))
    basis = _eigenbasis(h, x.shape[-2])
    values, vectors, floor = basis
    over_values = _inverse(values, floor)[..., None, :]

    def solve_leave(right):
        return product(product(right, vectors) * over_values, vectors.mT)

    along = product(factor.mT, tangent)
    turn = _solve_sum(h, along - along.mT, basis)
    leave = _linear_solve(lambda a: product(a, h), solve_leave, tangent - product(factor, along))
    return product(factor, turn) + leave


def solve_lyapunov(h: Squares, right: Squares) -> Squares:
    """The A with `H A + A H = B`: a linear equation to JAX, so that derivatives of any order pass.

    Args:
      h: H, symmetric, positive semi-definite, float32 or wider. Where a sum of two eigenvalues is
        zero to rounding the pseudo-inverse stands in.
      right: B, symmetric or skew.
    """
    return _solve_sum(h, right, _eigenbasis(h, h.shape[-1]))


def _solve_sum(h, right, basis):
    values, vectors, floor = basis
    over_sums = _inverse(values[..., :, None] + values[..., None, :], floor[..., None])

    def solve(right):
        inside = product(product(vectors.mT, right), vectors)
        return product(product(vectors, inside * over_sums), vectors.mT)

    return _linear_solve(lambda a: product(h, a) + product(a, h), solve, right)


def _eigenbasis(h, size):
    """Eigenvalues and eigenvectors, which solve and are not differentiated, and what is zero."""
    values, vectors = map_matrices(jnp.linalg.eigh, jax.lax.stop_gradient(h))
    return values, vectors, values[..., -1:] * size * jnp.finfo(h.dtype).eps


def _linear_solve(operator, solve, right):
    return jax.lax.custom_linear_solve(operator, right, lambda _, b: solve(b), symmetric=True)


def _inverse(values, floor):
    """One over what exceeds the floor, zero for the rest; NaN stays NaN."""
    keep = ~(values <= floor)
    return jnp.where(keep, 1 / jnp.where(keep, values, 1), 0)


def polish(gram: Squares, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST) -> Squares:
    """Return the factor that makes a nearly orthonormal `W` with this Gram matrix exact.

    The quintic Newton-Schulz step: it leaves the cube of the error.
    """
    return 15 / 8 * identity_like(gram) - 10 / 8 * gram + 3 / 8 * product(gram, gram, precision)


# On accelerators, where E is what a product in float32 has given: all that is done to it multiplies
# what is small, so the errors are. Three passes of bfloat16 for what grows with E, one for what is
# below 0.025 always.
_in_three_passes = functools.partial(product, precision=jax.lax.Precision.HIGH)
_in_one_pass = functools.partial(product, precision=jax.lax.Precision.DEFAULT)


def largest_row_sum(x: Squares) -> Float[Array, "*batch 1 1"]:
    """The largest absolute row sum, with two axes of length 1: it bounds the spectral norm.

    Args:
      x: matrices in the trailing two axes; leading axes are independent.
    """
    return jnp.max(jnp.sum(jnp.abs(x), axis=-1), axis=-1, initial=0)[..., None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def inverse_sqrt_minus_one(excess: Squares, max_iterations: int) -> Squares:
    """`(I + E)^{-1/2} - I` by products alone, with an error relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root and collects the product of the `p`. Carrying
    `E`, `p - I` and `D = root - I` in place of `S`, `p` and the root keeps the identity out of
    the rounding errors: near it the result is three times as accurate. One product or two where E
    is small. The derivative, in either mode, is that of the exact root.

    Args:
      excess: E, symmetric, float32 or wider, its eigenvalues between -1 and 4/3.
      max_iterations: where the iteration gives up, as it does at an eigenvalue of -1.
    """
    # The series leave 5/16 E^3 and 63/256 E^5: 8e-9 and 3e-9, or 2e-17 in float64.
    near, close = (3e-3, 0.025) if excess.dtype == jnp.float32 else (4e-6, 6e-4)

    def exceeds(square, limit):
        # The row sums of E^2 bound that of E, tighter than those of E itself by half or more. A
        # NaN compares false: it ends the loop for its own matrix, not for the others.
        return jnp.any(largest_row_sum(square) > limit**2)

    def quadratic(excess, square):
        return 0.375 * square - 0.5 * excess

    def compose(left, right):
        """`(I + left) (I + right) - I`."""
        return left + right + _in_three_passes(left, right)

    def unfinished(carry):
        count, _, square, _ = carry
        return (count < max_iterations) & exceeds(square, close)

    def step(carry):
        count, excess, square, root = carry
        p = quadratic(excess, square)
        excess = compose(compose(excess, p), p)
        return count + 1, excess, _in_three_passes(excess, excess), compose(root, p)

    def iterated(excess, square):
        start = (jnp.zeros((), jnp.int32), excess, square, jnp.zeros_like(excess))
        _, excess, square, root = jax.lax.while_loop(unfinished, step, start)
        rest = _in_one_pass(square, 35 / 128 * square - 5 / 16 * excess)
        return compose(root, quadratic(excess, square) + rest)

    square = _in_three_passes(excess, excess)
    # Steps of training end at once: one product.
    return jax.lax.cond(exceeds(square, near), iterated, quadratic, excess, square)


@inverse_sqrt_minus_one.defjvp
def _inverse_sqrt_minus_one_jvp(max_iterations, primals, tangents):
    """`H R' + R' H = -R E' R` with `H = R^-1`: the derivative of `R S R = I`."""
    (excess,), (tangent,) = primals, tangents
    found = inverse_sqrt_minus_one(excess, max_iterations)
    identity = identity_like(excess)
    inverse_root = identity + found
    root = sym(product(identity + excess, inverse_root))
    turned = product(inverse_root, product(sym(tangent), inverse_root))
    return found, solve_lyapunov(root, -turned)
