"""Non-negative matrices of fixed row and column sums: doubly stochastic ones, and rectangles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import (
    check_axes,
    check_fields,
    check_retraction,
    check_step_norm,
)
from manifoldmuon._internal.arrays import (
    Matrices,
    Numbers,
    largest,
    upcast,
)
from manifoldmuon._internal.directions import (
    at_any_scale,
    never_fused,
    projected_direction,
    stay_if_still,
)
from manifoldmuon._internal.scales import scale_of
from manifoldmuon.bounds import MatrixBounds, matrix_bounds
from manifoldmuon.contrib._sums import nearest_with_sums, sinkhorn
from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.retractions import Retraction
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.norms import FanRatio, Frobenius, Spectral


@dataclasses.dataclass(frozen=True)
class Nearest(Retraction):
    """The point of the set nearest to `X + V`: addition, where that stays.

    Points have rows of sum 1 and columns of sum m/n. Inside, the set is flat: geodesics are lines.

    Entries that would be negative become zero, and may grow again in any later step. Undoes the
    distance that X has from the set; see `nearest_with_sums`.

    Examples:
      >>> Nearest().retract(jnp.eye(2), -0.1 * jnp.ones((2, 2)) + 0.2 * jnp.eye(2)).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """

    points: ClassVar[tuple[str, ...]] = ("non-negative matrices of fixed sums",)
    order: ClassVar[float] = math.inf

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        return nearest_with_sums(point + vector, 1.0)


@dataclasses.dataclass(frozen=True)
class Sinkhorn(Retraction):
    """`X exp(V / X)`, entry by entry, balanced by Sinkhorn's iteration: entries stay positive.

    First order (Douik and Hassibi, arXiv:1802.02628, section III-C). A step no longer than the
    smallest entries would make others of them huge or zero, so no entry changes by a larger factor
    than `exp(limit)` before the balance, and none falls below 1e-30. An entry of zero stays zero.

    Attributes:
      limit: of the exponent `V / X`.
      max_iterations: where the balancing gives up; see `sinkhorn`.

    Raises:
      ValueError: a field is not positive.

    Examples:
      >>> DoublyStochastic(retraction=Sinkhorn(limit=0.5)).retraction
      Sinkhorn(limit=0.5)
    """

    limit: float = 1.0
    max_iterations: int = 200

    points: ClassVar[tuple[str, ...]] = ("non-negative matrices of fixed sums",)
    order: ClassVar[float] = 1

    def __post_init__(self):
        check_fields(self, limit="(0, inf)", max_iterations="[1, inf)")

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        gone = point <= 0
        exponent = jnp.clip(vector / jnp.where(gone, 1, point), -self.limit, self.limit)
        moved = jnp.maximum(jnp.log(jnp.where(gone, 1, point)) + exponent, math.log(1e-30))
        return sinkhorn(jnp.where(gone, -jnp.inf, moved), 1.0, self.max_iterations)


@dataclasses.dataclass(frozen=True)
class DoublyStochastic(Manifold):
    """Matrices without negative entries whose rows sum to r and whose columns sum to `r m / n`.

    Square ones with r = 1 are doubly stochastic, the Birkhoff polytope: averages of permutations,
    the mixing matrices of hyper-connections (arXiv:2512.24880). Of other shapes they are a
    transportation polytope of equal sums. The spectral norm of a point is `r sqrt(m / n)`, its
    RMS-to-RMS norm r: it never amplifies.

    The tangent space is that of all matrices with these sums: rows and columns of A sum to zero.
    Under the spectral norm the steepest direction is `msign(P G P)` with `P = I - 1 1^T / n` on
    each side, a closed form, the same at every point. An entry of zero may not fall, which this
    direction does not know: there the retraction takes out what would leave the set, and the
    certificate remains a bound, since the steepest of the feasible directions gains no more.

    Attributes:
      row_sum: r, a positive number.
      column_sum: for a check of shapes: what the columns sum to; None: what follows from the shape.
      retraction: how a step ends on the set: at its `Nearest` point, or by `Sinkhorn`.
      step_norm: the norm of steps, `Spectral` or `Frobenius`, taken as it is; None: the spectral
        norm relative to that of the points.

    Examples:
      >>> DoublyStochastic().project(jnp.zeros((2, 2))).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """

    row_sum: float = 1.0
    column_sum: float | None = None
    retraction: Retraction = Nearest()
    step_norm: Spectral | Frobenius | None = None
    ndim: ClassVar[int] = 2
    has_boundary: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self, row_sum="(0, inf)", column_sum="(0, inf)")
        check_retraction(self, "non-negative matrices of fixed sums")
        check_step_norm(self, Spectral, Frobenius)

    @property
    def norm(self) -> Spectral | Frobenius:
        return Spectral(scale=FanRatio(self.row_sum)) if self.step_norm is None else self.step_norm

    def check_shape(self, shape: tuple[int, ...]) -> None:
        check_axes(self, shape)
        m, n = shape[-2:]
        if self.column_sum is None:
            return
        if not math.isclose(m * self.row_sum, n * self.column_sum, rel_tol=1e-6):
            raise ValueError(
                f"no matrix of shape {(m, n)} has rows of sum {self.row_sum} and columns of sum "
                f"{self.column_sum}: its entries would sum to {m * self.row_sum:g} and to "
                f"{n * self.column_sum:g}; leave DoublyStochastic.column_sum out, or set it to "
                f"{self.row_sum * m / max(n, 1):g}"
            )

    def project(self, point: Matrices) -> Matrices:
        return nearest_with_sums(point, self.row_sum).astype(point.dtype)

    def project_tangent(self, point: Matrices, vector: Matrices) -> Matrices:
        return at_any_scale(_centered, vector, 2)

    def steepest(self, point: Matrices, grad: Matrices, dual: Any = ()) -> Steepest:
        direction, gap, residual = projected_direction(grad, _centered, self.norm)
        size = scale_of(self.norm.scale, grad.shape[-2:])
        if 1 in grad.shape[-2:]:  # a single point: zero is optimal
            gap = 0 * gap
        return Steepest(size * direction, (), residual, gap).astype(grad.dtype)

    def retract(self, point: Matrices, vector: Matrices) -> Matrices:
        unit, step = (upcast(x) / self.row_sum for x in (point, vector))
        moved = self.row_sum * self.retraction.retract(unit, step)
        return stay_if_still(point, vector, moved, 2)

    def random_point(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype) -> Matrices:
        """Positive entries, log-normal with deviation 1/2 before they are balanced."""
        self.check_shape(shape)
        logits = jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)) / 2
        return sinkhorn(logits, self.row_sum).astype(dtype)

    def distance(self, point: Matrices) -> Numbers:
        """The largest relative error of a sum, or the most negative entry as a share of r."""
        unit, (m, n) = upcast(point) / self.row_sum, point.shape[-2:]
        rows = jnp.abs(jnp.sum(unit, axis=-1) - 1)
        columns = jnp.abs(jnp.sum(unit, axis=-2) * (n / max(m, 1)) - 1)
        sums = jnp.maximum(largest(rows, -1), largest(columns, -1))
        return jnp.maximum(sums, largest(-unit, (-2, -1)))


def _centered(x: Matrices) -> Matrices:
    """Make all rows and columns sum to zero; twice, since the rest may be small beside rounding."""
    for axis in (-1, -2, -1, -2):
        x = x - never_fused(jnp.mean(x, axis=axis, keepdims=True))
    return x


@matrix_bounds.register
def doubly_stochastic_bounds(
    space: DoublyStochastic, shape: tuple[int, ...], drift: float = 0.0
) -> MatrixBounds:
    """Bound points whose entries are at least `-drift * row_sum`; docs/math/bounds.md proves it."""
    m, n = shape[-2:]
    total = space.row_sum * (1 + (n + 1) * drift)
    least_row = space.row_sum * max(1 - drift, 0.0) / math.sqrt(n)
    return MatrixBounds(total * math.sqrt(m / n), total * math.sqrt(min(1, m / n)), 0.0, least_row)
