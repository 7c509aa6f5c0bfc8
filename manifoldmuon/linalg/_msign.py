"""msign, the orthogonal polar factor of a matrix: every shape, scale and dtype, differentiable."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import match_orientation, mT, product, sym, tall
from manifoldmuon._internal.lapack import map_matrices
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent
from manifoldmuon.linalg._newton_schulz import MsignMethod, NewtonSchulz, check_method
from manifoldmuon.linalg._polar_express import PolarExpress

DEFAULT_MSIGN = NewtonSchulz(PolarExpress(3e-7, steps=13, safety=1.001, cushion=0.05))
"""Thirteen steps of Polar Express: matrix products only.

Orthogonal to a few units of float32 rounding up to a condition number of 1e6; singular values
below a millionth of the largest may come out between 0 and 1. The range is wider than 1e6 because
the Schatten norm by which the matrix is divided can exceed the spectral norm by n**(1/8), which
is 2.4 at n = 1000.
"""

TRAINING_MSIGN = NewtonSchulz(
    PolarExpress(1e-2, steps=4, safety=1.001, cushion=0.03), precision=jax.lax.Precision.DEFAULT
)
"""Four steps of Polar Express, for directions of descent: the price of Muon's five, or less.

Singular values down to 1e-2 of the Schatten norm come out within 0.014 of 1, where Muon's five
steps leave them within 0.3; smaller ones come out between 0 and 1. On accelerators every product
takes one pass (bfloat16 factors on a TPU, TF32 on a GPU), which adds up to 0.01 on a TPU;
`dataclasses.replace(TRAINING_MSIGN, precision=jax.lax.Precision.HIGHEST)` takes float32.
"""

BOUNDED_MSIGN = NewtonSchulz(
    PolarExpress(1e-2, steps=4, safety=1.001, cushion=0.03, contract=True),
    precision=jax.lax.Precision.DEFAULT,
)
"""`TRAINING_MSIGN` divided by its largest value, 1.0136: no singular value ends above 1.

`Norm.fast` takes it, so that directions have norm at most 1. On accelerators the rounding of
`TRAINING_MSIGN` stays.
"""


def msign(
    x: Float[Array, "*batch m n"], method: MsignMethod | None = None
) -> Float[Array, "*batch m n"]:
    """The orthogonal polar factor `U V^T` of each matrix `x = U S V^T`.

    It is the nearest matrix with orthonormal columns (rows, where x is wide) and the direction
    of steepest ascent under the spectral norm. Singular values that are zero stay zero.

    Each matrix is divided by a power of two first, so that `msign(c * x) == msign(x)` for every
    positive c that keeps x finite, from denormal numbers to the largest: to the bit where c is
    a power of two. A NaN or an infinity makes its own matrix NaN and no other one in the batch.

    The derivative is that of the exact polar factor, whatever the method: with `H = Q^T X`,

    `D msign(X)[E] = Q A + (I - Q Q^T) E H^-1`, where A is skew and `H A + A H = Q^T E - E^T Q`.

    It exists wherever x has full rank, also where singular values coincide (the derivative of
    an SVD is NaN there). At a rank-deficient x it is infinite in some directions; these
    contribute zero.

    Args:
      x: matrices in the trailing two axes, wide or tall; leading axes are independent.
        Any floating dtype; the arithmetic is done in float32 or wider.
      method: how; None is `DEFAULT_MSIGN`, which ends 4e-10 from orthogonal in float64. For all
        of its digits take `SVD()`.

    Returns:
      Shape and dtype of `x`; an empty array for an empty one.

    Raises:
      ValueError: `x` has fewer than two axes.
      TypeError: `x` is not of a floating dtype, or `method` is not a `MsignMethod`.
    """
    method = DEFAULT_MSIGN if method is None else method
    check_method("method", method)
    if x.ndim < 2:
        raise ValueError(
            f"msign takes matrices in the trailing two axes; got an array of shape {x.shape}"
        )
    if not jnp.issubdtype(
        x.dtype, jnp.inexact
    ):  # complex numbers are refused by `scale_to_unit_exponent`
        raise TypeError(f"msign takes a real floating dtype; got {x.dtype}")
    return _msign(x, method)


@functools.partial(jax.jit, static_argnums=1)
def _msign(x, method):
    if x.size == 0:
        return x
    scaled, _ = scale_to_unit_exponent(x, 2)
    return match_orientation(_polar(tall(scaled), method), x).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar(x: Float[Array, "*batch m n"], method: MsignMethod) -> Float[Array, "*batch m n"]:
    return method.polar(x)


@_polar.defjvp
def _polar_jvp(method, primals, tangents):
    (x,), (tangent,) = primals, tangents
    # A method that stops short of convergence has no factor to differentiate at: the default's
    # is used, which costs nothing more where it is the method itself.
    factor = _polar(x, DEFAULT_MSIGN)
    return _polar(x, method), polar_derivative(x, factor, tangent)


def polar_derivative(
    x: Float[Array, "*batch m n"],
    factor: Float[Array, "*batch m n"],
    tangent: Float[Array, "*batch m n"],
) -> Float[Array, "*batch m n"]:
    """The derivative of the polar factor at `x = Q H` in the direction `E`.

    `Q A + (I - Q Q^T) E H^-1` with the skew A that solves `H A + A H = Q^T E - E^T Q` (Higham,
    Functions of Matrices, 2008, sec. 8.1, by differentiating `x = Q H`). Both equations are
    solved in the eigenbasis of H, but are told to JAX as linear equations: their own derivative
    needs no derivative of the eigenvectors, so that higher derivatives are right as well.

    Args:
      x: tall or square.
      factor: Q, its polar factor.
      tangent: E.

    Returns:
      The derivative. Where H is singular to rounding the pseudo-inverse stands in: what would
      be infinite contributes zero.
    """
    h = sym(product(mT(factor), x))
    basis = _eigenbasis(h, x.shape[-2])
    values, vectors, floor = basis
    over_values = _inverse(values, floor)[..., None, :]

    def solve_leave(right):
        return product(product(right, vectors) * over_values, mT(vectors))

    along = product(mT(factor), tangent)
    turn = _solve_sum(h, along - mT(along), basis)
    leave = _linear_solve(lambda a: product(a, h), solve_leave, tangent - product(factor, along))
    return product(factor, turn) + leave


def solve_lyapunov(
    h: Float[Array, "*batch n n"], right: Float[Array, "*batch n n"]
) -> Float[Array, "*batch n n"]:
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
        inside = product(product(mT(vectors), right), vectors)
        return product(product(vectors, inside * over_sums), mT(vectors))

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
