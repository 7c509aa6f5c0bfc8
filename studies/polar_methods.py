"""Baseline methods of msign: QDWH, eigenvalues, inverse roots, and a sketch.

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


def polish(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Apply a Newton-Schulz step to remove rounding errors."""
    return 1.5 * x - 0.5 * x @ (x.T @ x)


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
            x = (x @ vectors / jnp.sqrt(jnp.maximum(values, positive(floor)))) @ vectors.T
        return polish(x)


@dataclasses.dataclass(frozen=True)
class InverseRoot(OneByOne):
    """`X (X^T X)^(-1/2)` by `inverse_root`, in a few passes, with matrix products only.

    Attributes:
      steps: steps of the coupled iteration in each pass.
      passes: three reach a condition number of 1e6 in float32.
    """

    steps: int = 24
    passes: int = 3

    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        for _ in range(self.passes):
            x = x @ inverse_root(x.T @ x, 2, self.steps, RIDGE)
        return polish(x)


@dataclasses.dataclass(frozen=True)
class Sketch(OneByOne):
    """`U_r V_r^T` for the `rank` largest singular values; the other directions become zero.

    A randomised range finder with power iterations and a small SVD (Halko, Martinsson, Tropp
    2011, algorithms 4.4 and 5.1). Accurate up to rounding if the singular values drop after the
    rank, otherwise an approximation.

    Attributes:
      rank: the number of singular directions, at most the number of columns.
      oversample: extra random directions, dropped at the end.
      power_iterations: the number of refinements of the range by `x x^T`.
      seed: seeds the random test matrix, which all matrices of a shape share.
    """

    rank: int
    oversample: int = 8
    power_iterations: int = 2
    seed: int = 0

    def _polar(self, x: Float[Array, "m n"]) -> Float[Array, "m n"]:
        n = x.shape[-1]
        kept, width = min(self.rank, n), min(self.rank + self.oversample, n)
        test = jax.random.normal(jax.random.key(self.seed), (n, width), x.dtype)
        basis, _ = jnp.linalg.qr(x @ test)
        for _ in range(self.power_iterations):
            back, _ = jnp.linalg.qr(x.T @ basis)
            basis, _ = jnp.linalg.qr(x @ back)
        left, values, right = jnp.linalg.svd(basis.T @ x, full_matrices=False)
        sign = values[:kept] > jnp.finfo(x.dtype).eps * values[0]
        return basis @ jnp.where(sign, left[:, :kept], 0) @ right[:kept]


def inverse_root(
    gram: Float[Array, "n n"], root: int = 2, steps: int = 24, ridge: float = 0.0
) -> Float[Array, "n n"]:
    """Compute `S^(-1/root)` by the coupled Newton iteration, with matrix products only.

    `T = ((p + 1) I - M) / p`, `X <- X T`, `M <- T^p M` from `M = S / c` (Lakić 1998; Higham,
    Functions of Matrices, 2008, sec. 7.3). With two roots of order 4 this is Shampoo's
    preconditioner: `(G G^T)^(-1/4) G (G^T G)^(-1/4) = msign(G)`.

    Args:
      gram: S, symmetric positive definite.
      root: p, at least 1.
      steps: the number of steps: about `log(condition number) / (p log(1 + 1/p))`, plus five.
      ridge: added to all eigenvalues, as a fraction of an upper bound of the largest.
    """
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    trace = positive(jnp.trace(gram))
    s = (gram + gram.T) / 2 / trace
    bound = positive(jnp.sqrt(jnp.linalg.norm(s @ s)))
    # The iteration converges for eigenvalues of M in (0, p + 1), fastest near 1.
    shrink = 2 / (root + 1)

    def advance(_, carry):
        factor, m = carry
        step = ((root + 1) * identity - m) / root
        half = jnp.linalg.matrix_power(step, root // 2)
        m = half @ m @ half
        m = step @ m if root % 2 else m
        factor = factor @ step
        return (factor + factor.T) / 2, (m + m.T) / 2

    start = identity, (s / bound + ridge * identity) / shrink
    factor, _ = jax.lax.fori_loop(0, steps, advance, start)
    return factor / (bound * trace * shrink) ** (1 / root)


def positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(x == 0, 1, x)
