"""Clipping of eigenvalues and singular values, by products alone in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Squares
from manifoldmuon._internal.matrices.powers_of_two import euclidean_norm
from manifoldmuon.linalg._msign import msign
from manifoldmuon.linalg._newton_schulz import MsignMethod
from manifoldmuon.linalg._svd import SVD


def spectral_projector(x: Squares, edge: float = 0.0, method: MsignMethod | None = None) -> Squares:
    """Return the projection onto eigenvectors of S with eigenvalues above `edge`: `(I + sign) / 2`.

    Args:
      x: S, symmetric, float32 or wider; leading axes are independent.
      edge: the threshold. Eigenvalues too close to it for the method come out between 0 and 1.
      method: method of msign for the sign; None: the default, or `SVD()` in float64, for all
        digits.

    Returns:
      Exactly symmetric, in the dtype of x.

    Examples:
      >>> spectral_projector(jnp.diag(jnp.array([2.0, 0.5])), 1.0).diagonal().round(4)
      Array([1., 0.], dtype=float32)
    """
    arrays.check_square("spectral_projector(x)", x)
    identity = arrays.identity_like(x)
    if method is None and x.dtype == jnp.float64:
        method = SVD()
    return (identity + arrays.sym(msign(x - edge * identity, method))) / 2


def positive_part(x: Squares, method: MsignMethod | None = None) -> Squares:
    """Return the nearest positive semi-definite matrix, `(S + |S|) / 2`.

    Args:
      x: S, see `spectral_projector`, also for the result.
      method: see there; eigenvalues below its resolution are halved at worst.

    Examples:
      >>> round(float(positive_part(jnp.diag(jnp.array([2.0, -3.0]))).sum()), 4)
      2.0
    """
    arrays.check_square("positive_part(x)", x)
    return arrays.sym(arrays.product(x, spectral_projector(x, 0.0, method)))


def clip_singular_values(x: Matrices, upper: float, method: MsignMethod | None = None) -> Matrices:
    """Return `U min(S, upper) V^T` for each `x = U S V^T`: nearest in the spectral-norm ball.

    With the polar factor Q and `H = Q^T X` it is `Q (H - (H - upper I)_+)`: two calls of `msign`.
    The error is some units of rounding of the largest singular value of x, not of `upper`.

    Args:
      x: matrices in the trailing two axes; leading axes are independent.
      upper: the largest allowed singular value, positive; not checked inside `jax.jit`.
      method: method for both calls; None: the default, or `SVD()` in float64.

    Returns:
      Shape and dtype of `x`; the arithmetic is done in float32 or wider.

    Examples:
      >>> clip_singular_values(jnp.diag(jnp.array([3.0, 0.5])), 1.0).diagonal().round(4)
      Array([1. , 0.5], dtype=float32)
    """
    if not isinstance(upper, jax.Array):
        check_number("clip_singular_values(upper)", upper, within="(0, inf)")
    if x.size == 0:
        return x
    high = arrays.tall(arrays.upcast(x))
    if method is None and high.dtype == jnp.float64:
        method = SVD()
    factor = msign(high, method)
    length = arrays.sym(arrays.product(factor.mT, high))
    excess = positive_part(length - upper * arrays.identity_like(length), method)
    # Inside the ball the error would be that of `upper`, however small the matrix.
    inside = arrays.expand_trailing(euclidean_norm(high, 2) <= upper, 2)
    excess = jnp.where(inside, 0, excess)
    clipped = high - arrays.product(factor, excess)
    return arrays.match_orientation(clipped, x).astype(x.dtype)
