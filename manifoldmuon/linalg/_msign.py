"""msign, the orthogonal polar factor of a matrix, differentiable, for every shape and scale."""

from __future__ import annotations

import functools

import jax

from manifoldmuon._internal.matrices.arrays import Matrices, check_floating, match_orientation, tall
from manifoldmuon._internal.matrices.polar import polar_derivative
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon.linalg._newton_schulz import GramNewtonSchulz, MsignMethod
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._svd import SVD

DEFAULT_MSIGN = GramNewtonSchulz(PolarExpress(3e-7, steps=13, safety=1.001, cushion=0.05))
"""Thirteen steps of Polar Express: matrix products only.

Orthogonal to a few units of float32 rounding up to a condition number of 1e6; singular values
below a millionth of the largest may come out between 0 and 1. The schedule covers more than 1e6
because it divides the matrix by a Schatten norm, which can exceed the spectral norm by a factor
n**(1/8), 2.4 at n = 1000.
"""

TRAINING_MSIGN = GramNewtonSchulz(
    PolarExpress(1e-2, steps=4, safety=1.001, cushion=0.03), precision=jax.lax.Precision.DEFAULT
)
"""Four steps of Polar Express, for training: as cheap as Muon's five steps, or cheaper.

Singular values down to 1e-2 of the Schatten norm come out within 0.014 of 1 (within 0.3 for Muon's
five steps); smaller singular values come out between 0 and 1. On accelerators every product takes a
single pass (bfloat16 factors on a TPU, TF32 on a GPU), which adds up to 0.01 on a TPU;
`dataclasses.replace(TRAINING_MSIGN, precision=jax.lax.Precision.HIGHEST)` takes float32.
"""

BOUNDED_MSIGN = GramNewtonSchulz(
    PolarExpress(1e-2, steps=4, safety=1.001, cushion=0.03, contract=True),
    precision=jax.lax.Precision.DEFAULT,
)
"""`TRAINING_MSIGN` divided by its largest value, 1.0136: no singular value ends above 1.

`Norm.for_training` uses it, so that directions have norm at most 1. On accelerators it rounds as
`TRAINING_MSIGN` does.
"""


def msign(x: Matrices, method: MsignMethod | None = None) -> Matrices:
    """Return the orthogonal polar factor `U V^T` of each matrix `x = U S V^T`.

    It is the nearest matrix with orthonormal columns (or rows, if x is wide) and the direction of
    steepest ascent under the spectral norm. Zero singular values stay zero.

    Each matrix is divided by a power of two first, so that `msign(c * x) == msign(x)` for every
    positive c that keeps x finite, from denormal numbers to the largest: bit for bit if c is a
    power of two. A NaN or an infinity makes its own matrix NaN, but no other matrix of the batch.

    Every method has the derivative of the exact polar factor: with `H = Q^T X`,

    `D msign(X)[E] = Q A + (I - Q Q^T) E H^-1`, where A is skew and `H A + A H = Q^T E - E^T Q`.

    It exists wherever x has full rank, also at equal singular values (where the derivative of an
    SVD is NaN). At a rank-deficient x it is infinite in some directions; these contribute zero.

    Args:
      x: matrices in the trailing two axes, wide or tall; leading axes are independent.
        Any floating dtype; the arithmetic is done in float32 or wider.
      method: the algorithm. None: `DEFAULT_MSIGN`, which in float64 is orthogonal to 4e-10; use
        `SVD()` for full float64 accuracy.

    Returns:
      Shape and dtype of `x`; an empty array for an empty `x`.

    Examples:
      >>> msign(jnp.diag(jnp.array([2.0, -3.0]))).diagonal().round(4)
      Array([ 1., -1.], dtype=float32)
    """
    method = DEFAULT_MSIGN if method is None else method
    MsignMethod.check("method", method)
    if x.ndim < 2:
        raise ValueError(
            f"msign takes matrices in the trailing two axes; got an array of shape {x.shape}"
        )
    check_floating(x.dtype)
    return _msign(x, method)


@functools.partial(jax.jit, static_argnums=1)
def _msign(x, method):
    if x.size == 0:
        return x
    scaled, _ = scale_to_unit_exponent(x, 2)
    return match_orientation(_polar(tall(scaled), method), x).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _polar(x: Matrices, method: MsignMethod) -> Matrices:
    return method.polar(x)


@_polar.defjvp
def _polar_jvp(method, primals, tangents):
    (x,), (tangent,) = primals, tangents
    # A method that has not converged returns no exact factor: differentiate at the default's
    # factor, which is free if the method is the default. `SVD` resolves more than the default.
    factor = _polar(x, method if isinstance(method, SVD) else DEFAULT_MSIGN)
    return _polar(x, method), polar_derivative(x, factor, tangent)
