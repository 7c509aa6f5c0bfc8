"""msign by the singular value decomposition: the definition, and the reference for all methods."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import Matrices, product
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.polar import polar_derivative
from manifoldmuon.linalg._newton_schulz import MsignMethod
from manifoldmuon.linalg._polynomials import odd_factor


@dataclasses.dataclass(frozen=True)
class SVD(MsignMethod):
    """`U V^T` from `x = U S V^T`: the definition.

    LAPACK's singular vectors are orthogonal to only some ten units of rounding; a Newton-Schulz
    step repairs them. Singular values up to eps times the largest count as zero, and zero stays
    zero: there the matrix does not determine its singular vectors.
    """

    def polar(self, x: Matrices) -> Matrices:
        return _factor(x)


# Singular vectors have NaN derivatives if singular values coincide, as in pairs of skew matrices.
@jax.custom_jvp
def _factor(x: Matrices) -> Matrices:
    left, values, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    floor = jnp.finfo(x.dtype).eps * values[..., :1]
    # Not `>=`, which would keep the singular vectors of a zero matrix.
    factor = product(jnp.where((values > floor)[..., None, :], left, 0), right)
    return product(factor, odd_factor(product(factor.mT, factor), (1.5, -0.5)))


@_factor.defjvp
def _factor_jvp(primals, tangents):
    factor = _factor(primals[0])
    return factor, polar_derivative(primals[0], factor, tangents[0])
