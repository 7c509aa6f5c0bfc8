"""The manifolds and retractions of the retraction laboratory, including baselines."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.linalg import spectral_norm
from manifoldmuon.manifolds import EmbeddingRows, Hypersphere, Manifold, Orthogonal, Stiefel
from manifoldmuon.manifolds.retractions import (
    QR,
    Cayley,
    Exponential,
    Geodesic,
    Normalize,
    Polar,
    Retraction,
)


@dataclasses.dataclass(frozen=True)
class NoRetraction(Retraction):
    """No retraction, `W + V`, for matrices and for vectors."""

    points: ClassVar[tuple[str, ...]] = ("orthonormal matrices", "unit vectors")
    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*shape"], vector: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        return point + vector


@dataclasses.dataclass(frozen=True)
class Scalar(Retraction):
    """`(W + V) / sqrt(1 + eta^2)` with `eta = ||V||_2`.

    Correct if every singular value of V is eta, as for full-rank directions on the orthogonal
    manifold (Modula documentation, orthogonal page); otherwise it leaves the set.
    """

    order: ClassVar[float] = 1

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        return (point + vector) / jnp.sqrt(1 + spectral_norm(vector) ** 2)[..., None, None]


@dataclasses.dataclass(frozen=True)
class Analytic(Retraction):
    """`(W + V)(I - A^T A + A^T A / sqrt(1 + eta^2))` with `V = eta A` and `eta = ||V||_2`.

    Equals `Polar` if `A` is a partial isometry (Modula documentation, orthogonal and Stiefel
    pages); otherwise the result misses the set by up to eta^4 / 10. Steps are cut to length 1.
    """

    order: ClassVar[float] = 2
    longest: ClassVar[float] = 1.0

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        gram = jnp.matmul(vector.mT, vector, precision="highest")  # eta^2 A^T A
        root = jnp.sqrt(1 + spectral_norm(gram))[..., None, None]
        moved = point + vector
        # (1 - 1/r) / eta^2 = 1 / (r (r + 1)) with r^2 = 1 + eta^2: finite at eta = 0.
        return moved - jnp.matmul(moved, gram, precision="highest") / (root * (root + 1))


@dataclasses.dataclass(frozen=True)
class SphereScalar(Retraction):
    """`(w + v) / sqrt(1 + eta^2)` with `eta = ||v||` (Modula documentation, hypersphere page).

    Equals `Normalize`, except that rounding errors accumulate.
    """

    points: ClassVar[tuple[str, ...]] = ("unit vectors",)
    order: ClassVar[float] = 2

    def retract(
        self, point: Float[Array, "*batch d"], vector: Float[Array, "*batch d"]
    ) -> Float[Array, "*batch d"]:
        return (point + vector) / jnp.sqrt(1 + jnp.sum(vector**2, axis=-1, keepdims=True))


MATRIX = {
    "polar": Polar(),
    "analytic": Analytic(),
    "QR": QR(),
    "Cayley": Cayley(),
    "exponential": Exponential(),
    "scalar": Scalar(),
    "none": NoRetraction(),
}
SPHERE = {
    "normalize": Normalize(),
    "geodesic": Geodesic(),
    "scalar": SphereScalar(),
    "none": NoRetraction(),
}


@dataclasses.dataclass(frozen=True)
class Space:
    """A manifold and its settings in the laboratory.

    Attributes:
      build: maps a retraction and the shape of a matrix to the manifold.
      retractions: suitable retractions by name, the package's default first.
      exact: the name of the retraction along geodesics.
      shape: the (small) shape of points in measurements of order and drift.
      large: the shape of points in measurements of cost.
      widths: the widths of the hidden layers of the trained network.
      matrix: whether distances are measured by singular values (else by row lengths).
    """

    build: Callable[[Any, tuple[int, ...]], Manifold]
    retractions: dict[str, Any]
    exact: str
    shape: tuple[int, int]
    large: tuple[int, int]
    widths: tuple[int, ...]
    matrix: bool

    def distance(self, points: np.ndarray) -> np.ndarray:
        """Return the largest `|sigma - 1|` or `|length - 1|` of each point, in float64; NaN for
        points that are not finite."""
        points = np.asarray(points, np.float64)
        bad = np.asarray(~np.isfinite(points).all(axis=(-2, -1)))  # LAPACK raises for NaN
        safe = np.where(bad[..., None, None], 0, points)
        if self.matrix:
            sizes = np.linalg.svd(safe, compute_uv=False)
        else:
            sizes = np.linalg.norm(safe, axis=-1)
        return np.asarray(np.where(bad, np.nan, np.abs(sizes - 1).max(axis=-1)))


def _stiefel(retraction: Any, shape: tuple[int, ...]) -> Manifold:
    del shape
    return Stiefel(retraction=retraction)


def _orthogonal(retraction: Any, shape: tuple[int, ...]) -> Manifold:
    """Return Orthogonal for square matrices, Stiefel otherwise (the last layer of a network)."""
    square = shape[-2] == shape[-1]
    return (Orthogonal if square else Stiefel)(retraction=retraction)


def _sphere(retraction: Any, shape: tuple[int, ...]) -> Manifold:
    """Return a sphere for whole matrices, with the Frobenius norm of a point on Stiefel."""
    return Hypersphere(math.sqrt(min(shape)), ndim=2, retraction=retraction)


def _rows(retraction: Any, shape: tuple[int, ...]) -> Manifold:
    del shape
    return EmbeddingRows(1.0, retraction=retraction)


# Products at the large shapes take about a millisecond; for smaller products the call overhead
# would be measured as well.
SPACES = {
    "Stiefel": Space(_stiefel, MATRIX, "exponential", (16, 4), (1024, 256), (128, 64), True),
    "orthogonal": Space(_orthogonal, MATRIX, "exponential", (8, 8), (512, 512), (64, 64), True),
    "hypersphere": Space(_sphere, SPHERE, "geodesic", (1, 64), (1024, 256), (128, 64), False),
    "rows": Space(_rows, SPHERE, "geodesic", (8, 16), (1024, 256), (128, 64), False),
}
