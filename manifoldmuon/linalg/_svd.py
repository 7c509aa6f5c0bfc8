"""msign by the singular value decomposition: the definition, and the reference for all methods."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices.arrays import Matrices, product
from manifoldmuon._internal.matrices.lapack import map_matrices
from manifoldmuon._internal.matrices.polar import polar_derivative
from manifoldmuon.linalg._newton_schulz import MsignMethod
from manifoldmuon.linalg._polynomials import polish


@dataclasses.dataclass(frozen=True)
class SVD(MsignMethod):
    """`U V^T` from `x = U S V^T`: the definition.

    LAPACK's singular vectors are orthogonal to only some ten units of rounding; a Newton-Schulz
    step repairs them.

    Attributes:
      cutoff: singular values up to `cutoff * eps` times the largest count as zero, and zero stays
        zero. Below `eps` the matrix does not determine its singular vectors.

    Examples:
      >>> msign(jnp.diag(jnp.array([2.0, -3.0])), SVD()).diagonal()
      Array([ 1., -1.], dtype=float32)
    """

    cutoff: float = 1.0

    def __post_init__(self):
        check_fields(self, cutoff="[0, inf)")

    def polar(self, x: Matrices) -> Matrices:
        return _factor(x, self.cutoff)


# Singular vectors have NaN derivatives if singular values coincide, as in pairs of skew matrices.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _factor(x: Matrices, cutoff: float) -> Matrices:
    left, values, right = map_matrices(lambda x: jnp.linalg.svd(x, full_matrices=False), x)
    floor = cutoff * jnp.finfo(x.dtype).eps * values[..., :1]
    # Not `>=`, which would keep the singular vectors of a zero matrix.
    kept = jnp.where((values > floor)[..., None, :], left, 0)
    return polish(product(kept, right))


@_factor.defjvp
def _factor_jvp(cutoff, primals, tangents):
    factor = _factor(primals[0], cutoff)
    return factor, polar_derivative(primals[0], factor, tangents[0])
