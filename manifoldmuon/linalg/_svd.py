"""msign by a thin singular value decomposition."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import product
from manifoldmuon.linalg._method import MsignMethod
from manifoldmuon.linalg._polynomials import polish


@dataclasses.dataclass(frozen=True)
class SVD(MsignMethod):
    """`U V^T` from `x = U S V^T`: the definition.

    LAPACK's singular vectors are orthogonal to some ten units of rounding only, which one
    Newton-Schulz step repairs.

    Attributes:
      cutoff: singular values at most `cutoff * eps` times the largest count as zero, and zero
        stays zero. Below `eps` the matrix does not determine its singular vectors.
    """

    cutoff: float = 1.0

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        left, values, right = jnp.linalg.svd(x, full_matrices=False)
        floor = self.cutoff * jnp.finfo(x.dtype).eps * values[..., :1]
        # Not >=, or this fails with a matrix of zeros.
        return polish(product(left * (values > floor)[..., None, :], right))
