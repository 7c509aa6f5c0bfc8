"""msign from the eigenvalues of the Gram matrix."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import mT, product
from manifoldmuon.linalg._method import MsignMethod
from manifoldmuon.linalg._polynomials import polish


@dataclasses.dataclass(frozen=True)
class GramEigh(MsignMethod):
    """`X V S^(-1/2) V^T` from `X^T X = V S V^T`, in a few passes.

    The Gram matrix has the squared condition number, so one pass in float32 is right only up
    to a condition number of a thousand or so. Eigenvalues below rounding are lifted to it, so
    that a pass divides the condition number by `eps**(-1/2)` and the next one starts from there
    (the idea of shifted Cholesky QR, Fukaya et al. 2020). A Newton-Schulz step at the end removes
    the rounding errors of the eigenvectors.

    Attributes:
      passes: three reach a condition number of 1e6 in float32.
    """

    passes: int = 3

    def __post_init__(self):
        if self.passes < 1:
            raise ValueError(f"passes must be at least 1; got {self.passes!r}")

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        for _ in range(self.passes):
            values, vectors = jnp.linalg.eigh(product(mT(x), x), symmetrize_input=False)
            floor = 4 * jnp.finfo(x.dtype).eps * values[..., -1:]
            lifted = jnp.maximum(values, jnp.where(floor == 0, 1, floor))
            scaled = product(x, vectors) / jnp.sqrt(lifted)[..., None, :]
            x = product(scaled, mT(vectors))
        return polish(x)
