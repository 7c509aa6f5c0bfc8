"""msign by decompositions: the definition, and the references for everything else."""

from __future__ import annotations

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.arrays import mT, nonzero_or_one, product
from manifoldmuon._internal.lapack import map_matrices
from manifoldmuon.linalg._msign import polar_derivative
from manifoldmuon.linalg._newton_schulz import MsignMethod
from manifoldmuon.linalg._polynomials import polish


class _Decomposition(MsignMethod):
    """A method whose derivative is that of the exact factor, in either mode.

    Those of singular vectors and eigenvectors are NaN where values coincide, as those of skew
    matrices do in pairs.
    """

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        return _factor(self, x)

    @abc.abstractmethod
    def _decompose(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """The factor."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _factor(method: _Decomposition, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    return method._decompose(x)


@_factor.defjvp
def _factor_jvp(method, primals, tangents):
    (x,), (tangent,) = primals, tangents
    factor = _factor(method, x)
    return factor, polar_derivative(x, factor, tangent)


@dataclasses.dataclass(frozen=True)
class SVD(_Decomposition):
    """`U V^T` from `x = U S V^T`: the definition.

    LAPACK's singular vectors are orthogonal to some ten units of rounding only, which one
    Newton-Schulz step repairs.

    Attributes:
      cutoff: singular values at most `cutoff * eps` times the largest count as zero, and zero
        stays zero. Below `eps` the matrix does not determine its singular vectors.
    """

    cutoff: float = 1.0

    def __post_init__(self):
        check_fields(self, cutoff="[0, inf)")

    def _decompose(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        left, values, right = map_matrices(_svd, x)
        floor = self.cutoff * jnp.finfo(x.dtype).eps * values[..., :1]
        # Not >=, or this fails with a matrix of zeros.
        kept = jnp.where((values > floor)[..., None, :], left, 0)
        return polish(product(kept, right))


@dataclasses.dataclass(frozen=True)
class QDWH(_Decomposition):
    """JAX's `jax.lax.linalg.qdwh` (Nakatsukasa and Higham 2013), matrix by matrix.

    Rational instead of polynomial steps: five or six of them cover a condition number of
    1/eps, but each takes a QR or a Cholesky factorisation. The most orthogonal of the methods.
    Directions in which the matrix is singular to rounding come out of arbitrary size. Inside of
    `jax.shard_map` it needs `check_vma=False`.
    """

    def _decompose(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        return map_matrices(_qdwh, x)


@dataclasses.dataclass(frozen=True)
class GramEigh(_Decomposition):
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
        check_fields(self, passes="[1, inf)")

    def _decompose(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        for _ in range(self.passes):
            values, vectors = map_matrices(_eigh, product(mT(x), x))
            floor = 4 * jnp.finfo(x.dtype).eps * values[..., -1:]
            lifted = jnp.maximum(values, nonzero_or_one(floor))
            scaled = product(x, vectors) / jnp.sqrt(lifted)[..., None, :]
            x = product(scaled, mT(vectors))
        return polish(x)


@dataclasses.dataclass(frozen=True)
class Sketch(MsignMethod):
    """`U_r V_r^T` for the `rank` largest singular values; the other directions become zero.

    A randomised range finder with power iterations and a small SVD (Halko, Martinsson, Tropp
    2011, algorithms 4.4 and 5.1). Right to rounding where the singular values fall off behind
    the rank, an approximation where they do not. Its cost is linear in the rank.

    Attributes:
      rank: how many singular directions; at most those of the matrix are returned.
      oversample: further random directions, dropped at the end.
      power_iterations: how often the range is refined by `x x^T`.
      seed: of the random test matrix, which is the same for every matrix of a shape.
    """

    rank: int
    oversample: int = 8
    power_iterations: int = 2
    seed: int = 0

    def __post_init__(self):
        counts = dict.fromkeys(("oversample", "power_iterations", "seed"), "[0, inf)")
        check_fields(self, rank="[1, inf)", **counts)

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        n = x.shape[-1]
        kept, width = min(self.rank, n), min(self.rank + self.oversample, n)
        test = jax.random.normal(jax.random.key(self.seed), (n, width), x.dtype)
        basis = _orthonormal(product(x, test))
        for _ in range(self.power_iterations):
            basis = _orthonormal(product(x, _orthonormal(product(mT(x), basis))))
        left, values, right = map_matrices(_svd, product(mT(basis), x))
        # As in SVD: what is below rounding of the largest value, and zero, stays zero.
        sign = values[..., :kept] > jnp.finfo(x.dtype).eps * values[..., :1]
        left = jnp.where(sign[..., None, :], left[..., :, :kept], 0)
        return product(product(basis, left), right[..., :kept, :])


def _orthonormal(x):
    return map_matrices(jnp.linalg.qr, x)[0]


@functools.partial(jnp.vectorize, signature="(m,n)->(m,n)")
def _qdwh(x):
    return jax.lax.linalg.qdwh(x)[0]


def _svd(x):
    return jnp.linalg.svd(x, full_matrices=False)


def _eigh(x):
    return jnp.linalg.eigh(x, symmetrize_input=False)
