"""The tangent-projected polar factor: the cheap direction on Stiefel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.spectral import contraction_factor, nuclear_parts
from manifoldmuon.linalg import NewtonSchulz, PolarExpress, Schedule, SkewNewtonSchulz, inverse_sqrt
from manifoldmuon.manifolds.solvers._closed_form import SkewPolar
from manifoldmuon.manifolds.solvers._parts import (
    ROUNDED_SCHEDULE,
    duality_gap,
    is_noise,
    tangent_parts,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._solver import SolverByPlatform, Steepest, StiefelSolver
from manifoldmuon.norms import Norm

# Three steps of degree 9 end within 0.004 of 1, quintics with as many products within 0.013. The
# Gram matrix is formed only once, so its rounding errors, 1e-7 of its largest entry, must not be
# magnified to order 1: singular values below 1e-2 are not brought all the way to 1.
COARSE_SCHEDULE = PolarExpress(1e-2, degree=9, steps=3, safety=1.0001, cushion=0.03)


@dataclasses.dataclass(frozen=True)
class ProjectedPolar(SolverByPlatform):
    """`msign(G - W sym(W^T G))`, projected, and shortened to norm 1 if needed.

    When to use it: in training, for three more tall products than an unconstrained direction. It is
    exact for square points, and if the part of G normal to W is so well conditioned that the sign
    stays tangent. On ill-conditioned gradients it falls several percent short of the optimum,
    unlike `ClosedForm()`.

    Attributes:
      schedule: drives the inverse root of the Gram matrix; None: the default for the precision.
      precision: the precision of float32 products on accelerators; None: one pass of bfloat16
        there. Below `HIGHEST` the schedule is applied to the tangent part itself, with some more
        products: its Gram matrix would resolve singular values only down to a tenth of the largest.
    """

    schedule: Schedule | None = None
    precision: jax.lax.Precision | None = None

    def __post_init__(self):
        if self.schedule is not None:
            Schedule.check("ProjectedPolar.schedule", self.schedule)
        if self.precision is not None:
            arrays.check_precision("ProjectedPolar.precision", self.precision)

    def choices(self, shape: tuple[int, ...]) -> tuple[StiefelSolver, StiefelSolver]:
        high, low = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
        if self.precision is not None:
            high = low = self.precision
        return _Projected(self.schedule, high), _Projected(self.schedule, low)


@dataclasses.dataclass(frozen=True)
class _Projected(StiefelSolver):
    """`ProjectedPolar` in a given precision."""

    schedule: Schedule | None
    precision: jax.lax.Precision

    def solve(self, norm: Norm, at: Matrices, grad: Matrices, dual: Any) -> Steepest:
        exact = self.precision == jax.lax.Precision.HIGHEST
        if at.shape[-2] == at.shape[-1]:
            square = _SQUARE if exact else SkewPolar(self._rounded(), precision=self.precision)
            return square.solve(norm, at, grad, dual)
        with jax.default_matmul_precision(self.precision.name.lower()):
            scaled, _ = scale_to_unit_exponent(grad, ndim=2)
            result = (self._coupled if exact else self._direct)(at, scaled)
        return result._replace(dual=dual)

    def _coupled(self, point: Matrices, grad: Matrices):
        """Return `[along; outer] root`, with the inverse root of the Gram matrix."""
        # The tangent part is W along + outer. The difference of the Gram matrices of G and W B
        # would save a product, and be pure rounding for a small tangent part.
        along, outer = tangent_parts(point, grad)
        normal = arrays.gram_matrix(outer, outer)
        square = arrays.inner_product(along, along) + arrays.trace(normal)
        # An entry of `normal` is off by less than a unit of rounding times the lengths of two
        # columns. The root must not be too large for `outer` itself.
        raised = arrays.expand_trailing(jnp.finfo(normal.dtype).eps * square, 2)
        normal = normal + raised * arrays.identity_like(normal)
        gram = normal - along @ along
        root = inverse_sqrt(gram, self.schedule or COARSE_SCHEDULE)
        raw, rest = along @ root, root @ (normal @ root)
        residual, turned = tangent_residual(raw), arrays.skew(raw)
        # A polar factor projected onto the tangent space has norm at most 2 / sqrt(3).
        factor = contraction_factor(rest - turned @ turned, 0.006)
        # <X, A> of the raw direction, as `along` is skew; times the factor, that of the result.
        gained = jnp.sum(along * turned + normal * root, axis=(-2, -1))
        upper = gained + _missed(gram, raw.mT @ raw + rest)
        still = is_noise(arrays.safe_sqrt(square), grad)
        factor = jnp.where(arrays.expand_trailing(still, 2), 0, factor)
        gap = duality_gap(upper, gained * factor[..., 0, 0], grad)
        direction = (
            arrays.right_multiply(outer, root) + arrays.right_multiply(point, turned)
        ) * factor
        return Steepest(direction, (), residual, gap)

    def _direct(self, point: Matrices, grad: Matrices):
        """Apply the schedule to `[along; outer]`, with a new Gram matrix in every step."""
        high, n = arrays.tall(point), min(point.shape[-2:])
        tangent = jnp.concatenate(tangent_parts(high, arrays.tall(grad), self.precision), axis=-2)
        still = is_noise(arrays.frobenius_norm(tangent), grad, self.precision)[..., None, None]
        sign = jnp.where(still, 0, self._rounded().polar(tangent))
        gained, missed = nuclear_parts(tangent, sign, self.precision)
        turned, away = arrays.skew(sign[..., :n, :]), sign[..., n:, :]
        factor = contraction_factor(turned.mT @ turned + away.mT @ away, 0.01)
        turned, away = turned * factor, away * factor
        value = arrays.inner_product(tangent, jnp.concatenate([turned, away], axis=-2))
        residual = tangent_residual(sign[..., :n, :])
        gap = duality_gap(gained + missed, value, grad, self.precision)
        return Steepest(arrays.match_orientation(high @ turned + away, grad), (), residual, gap)

    def _rounded(self) -> NewtonSchulz:
        return NewtonSchulz(self.schedule or ROUNDED_SCHEDULE, precision=self.precision)


# For square points: singular values down to 1e-2 of the Schatten norm end above 0.99.
_SQUARE = SkewPolar(SkewNewtonSchulz(dataclasses.replace(COARSE_SCHEDULE, contract=True)))


def _missed(gram: Squares, closed: Squares) -> Numbers:
    """Return the second result of `nuclear_parts` from `x^T x` and `A^T A`."""
    slack = arrays.identity_like(gram) - closed
    # ||x slack||_F^2 = tr(slack x^T x slack); rounding may leave a small negative number.
    square = jnp.maximum(arrays.inner_product(slack, gram @ slack), 0)
    return arrays.safe_sqrt(gram.shape[-1] * square)
