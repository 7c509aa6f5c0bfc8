"""msign by the QR-based, dynamically weighted Halley iteration."""

import dataclasses

import jax
from jaxtyping import Array, Float

from manifoldmuon.linalg._method import MsignMethod


@dataclasses.dataclass(frozen=True)
class QDWH(MsignMethod):
    """JAX's `jax.lax.linalg.qdwh` (Nakatsukasa and Higham 2013), matrix by matrix.

    Rational instead of polynomial steps: five or six of them cover a condition number of
    1/eps, but each takes a QR or a Cholesky factorisation. The most orthogonal of the methods.
    Directions in which the matrix is singular to rounding come out of arbitrary size.
    """

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        flat = x.reshape((-1, *x.shape[-2:]))
        return jax.vmap(lambda one: jax.lax.linalg.qdwh(one)[0])(flat).reshape(x.shape)
