"""Embedding tables whose vectors all have the same length."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import prescale, upcast
from manifoldmuon.manifolds._hypersphere import Hypersphere
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._points import require_axes
from manifoldmuon.manifolds._scale import RootDim, ScaleRule, check_scale
from manifoldmuon.manifolds._vectors import lengths_of, unit_tangent, without_radial
from manifoldmuon.manifolds.retractions import Normalize, SphereRetraction
from manifoldmuon.norms._frobenius import normalize
from manifoldmuon.norms._rows import fresh


@dataclasses.dataclass(frozen=True)
class EmbeddingRows(Manifold):
    """Tables `(vocabulary, d)` whose rows lie on the sphere of length `radius`.

    The norm of a direction is the largest among its rows, relative to the radius, so the
    steepest direction turns every row by the same angle: the l1-to-RMS geometry of an embedding
    (modular duality, arXiv:2410.21265). A table stored `(d, vocabulary)` goes through
    `Axes.transposed(EmbeddingRows())`.

    A row whose tangent gradient is below `threshold` times the longest one of its table is
    stale (a token not seen for hundreds of steps, its momentum decayed to 1e-30) and gets zero
    instead of a full step along rounding errors; see `manifoldmuon.norms.L1ToRMS`. Rows that
    are all zeros (a padding token) stay.

    Attributes:
      radius: a positive number or a rule; the default `RootDim()` is sqrt(d), unit
        root-mean-square norm.
      threshold: the relative length below which a row's gradient counts as stale.
      retraction: how a step returns to the spheres.
    """

    radius: float | ScaleRule = RootDim()
    threshold: float = 1e-6
    retraction: SphereRetraction = Normalize()

    def __post_init__(self):
        check_scale("EmbeddingRows.radius", self.radius)

    @property
    def ndim(self) -> int:
        return 2

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)

    def project(self, point: Float[Array, "*batch v d"]) -> Float[Array, "*batch v d"]:
        return self._row.project(point)

    def tangent(
        self, point: Float[Array, "*batch v d"], vector: Float[Array, "*batch v d"]
    ) -> Float[Array, "*batch v d"]:
        return self._row.tangent(point, vector)

    def norm(self, vector: Float[Array, "*batch v d"]) -> Float[Array, "*batch"]:
        return jnp.max(self._row.norm(vector), axis=-1, initial=0)

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def steepest(
        self, point: Float[Array, "*batch v d"], grad: Float[Array, "*batch v d"], dual
    ) -> Steepest:
        exact = upcast(grad)
        unit = normalize(upcast(point), 1)
        direction, residual = unit_tangent(unit, exact)
        scaled, _ = prescale(exact, 2)  # one scale for the table: rows are compared
        gains = lengths_of(without_radial(unit, scaled))
        keep = fresh(gains, self.threshold)
        direction = jnp.where(keep[..., None], direction, 0)
        total = jnp.sum(gains, axis=-1)
        missed = jnp.sum(jnp.where(jnp.all(direction == 0, axis=-1), gains, 0), axis=-1)
        gap = jnp.where(total == 0, 0.0, missed / jnp.where(total == 0, 1.0, total))
        direction = (self._row._radius(grad) * direction).astype(grad.dtype)
        return Steepest(direction, (), jnp.max(residual, axis=-1, initial=0), gap)

    def retract(
        self, point: Float[Array, "*batch v d"], vector: Float[Array, "*batch v d"]
    ) -> Float[Array, "*batch v d"]:
        return self._row.retract(point, vector)

    def random_point(
        self, key: PRNGKeyArray, shape: tuple[int, ...], dtype
    ) -> Float[Array, "*batch v d"]:
        self.check_shape(shape)
        return self._row.random_point(key, shape, dtype)

    def distance(self, point: Float[Array, "*batch v d"]) -> Float[Array, "*batch"]:
        return jnp.max(self._row.distance(point), axis=-1, initial=0)

    @property
    def _row(self) -> Hypersphere:
        return Hypersphere(self.radius, retraction=self.retraction)
