"""Baseline methods of msign: QDWH, eigenvalues of the Gram matrix, and its inverse root.

`GramEigh` and `InverseRoot` use the Gram matrix, which has the squared condition number. They raise
eigenvalues below rounding error, so that a pass divides the condition number by `eps**(-1/2)`, and
the next pass continues from there (the idea of shifted Cholesky QR, Fukaya et al. 2020).
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import MsignMethod

RIDGE = 1e-6
"""The ridge of `InverseRoot`: larger than the rounding error of a float32 Gram eigenvalue."""


class OneByOne(MsignMethod):
    """A method for a single matrix, `_polar`; stacks are processed sequentially."""

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        with jax.default_matmul_precision("highest"):
            return jax.lax.map(self.polar, x) if x.ndim > 2 else self._polar(x)

    @abc.abstractmethod
    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        """Return the polar factor."""


@dataclasses.dataclass(frozen=True)
class QDWH(OneByOne):
    """JAX's `jax.lax.linalg.qdwh` (Nakatsukasa and Higham 2013).

    Rational instead of polynomial steps: five or six suffice for a condition number of 1/eps, but
    each step takes a QR or Cholesky factorisation. The most orthogonal of these methods.
    """

    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        return jax.lax.linalg.qdwh(x)[0]


@dataclasses.dataclass(frozen=True)
class GramEigh(OneByOne):
    """`X V S^(-1/2) V^T` from `X^T X = V S V^T`, in a few passes.

    Attributes:
      passes: three reach a condition number of 1e6 in float32.
    """

    passes: int = 3

    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        for _ in range(self.passes):
            values, vectors = jnp.linalg.eigh(x.T @ x)
            floor = 4 * jnp.finfo(x.dtype).eps * values[-1]
            x = (x @ vectors / jnp.sqrt(jnp.maximum(values, _positive(floor)))) @ vectors.T
        return _polished(x)


@dataclasses.dataclass(frozen=True)
class InverseRoot(OneByOne):
    """`X (X^T X)^(-1/2)` by the coupled Newton iteration, in a few passes of matrix products.

    `T = (3 I - M) / 2`, `X <- X T`, `M <- T M T` from `M = S / c` (Lakić 1998; Higham, Functions of
    Matrices, 2008, sec. 7.3).

    Attributes:
      steps: steps of the coupled iteration in each pass.
      passes: three reach a condition number of 1e6 in float32.
    """

    steps: int = 24
    passes: int = 3

    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        for _ in range(self.passes):
            x = x @ self._inverse_root(x.T @ x)
        return _polished(x)

    def _inverse_root(self, gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
        identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
        trace = _positive(jnp.trace(gram))
        s = (gram + gram.T) / 2 / trace
        bound = _positive(jnp.sqrt(jnp.linalg.norm(s @ s)))
        # The iteration converges for eigenvalues of M in (0, 3), fastest near 1.
        shrink = 2 / 3

        def advance(_, carry):
            factor, m = carry
            step = (3 * identity - m) / 2
            factor, m = factor @ step, step @ m @ step
            return (factor + factor.T) / 2, (m + m.T) / 2

        start = identity, (s / bound + RIDGE * identity) / shrink
        factor, _ = jax.lax.fori_loop(0, self.steps, advance, start)
        return factor / jnp.sqrt(bound * trace * shrink)


def _polished(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Apply a Newton-Schulz step to remove rounding errors."""
    return 1.5 * x - 0.5 * x @ (x.T @ x)


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(x == 0, 1, x)
