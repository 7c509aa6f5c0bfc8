"""Parts of a gradient on the Stiefel manifold, and the duality gap of a direction.

With an orthonormal basis `Q` of the part of `G` normal to `W`, `G = W B + Q R`, and every feasible
direction worth considering is `A = W X + Q Y`: a solver that takes the `split` needs only `n x n`
matrices, for any number of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Matrices, Numbers, Squares
from manifoldmuon._internal.matrices.polar import polish
from manifoldmuon.linalg import NewtonSchulz, PolarExpress, Schedule, inverse_sqrt

_SMALL_PART = 0.1  # a smaller part of the gradient is projected off W twice

# For singular values down to 2e-3 of the bound. Rounding spoils some digits of the result; the
# polishing step restores them.
SPLIT_SCHEDULE = PolarExpress(2e-3, steps=6, safety=1.0001, cushion=0.03)
# Products in one pass of bfloat16: more steps gain nothing, since each must also cover values that
# rounding has lifted above its interval.
ROUNDED_SCHEDULE = PolarExpress(1e-2, steps=4, safety=1.01, cushion=0.03, contract=True)


class Split(NamedTuple):
    """`G = W inner + Q normal`, up to `defect`; `Q` is kept in factors, see `assemble`.

    Attributes:
      point: the point `W`.
      inner: `B = W^T G`.
      normal: `R = Q^T G`, with the Gram matrix of `G - W B`.
      rough: a tall `Q_1`, orthonormal and normal to `W` only to a few digits.
      overlap: `W^T Q_1`.
      correction: `C` with `Q = (Q_1 - W overlap) C` orthonormal to rounding.
      defect: an upper bound on the nuclear norm of `G - W B - Q R`: the directions that `Q` leaves
        out, too small relative to the others for float32 to tell from rounding.
    """

    point: Matrices
    inner: Squares
    normal: Squares
    rough: Matrices
    overlap: Squares
    correction: Squares
    defect: Numbers

    def assemble(self, inner: Squares, normal: Squares) -> Matrices:
        """Return `W inner + Q normal`."""
        polished = self.correction @ normal
        return self.point @ (inner - self.overlap @ polished) + self.rough @ polished


def split(
    point: Matrices,
    grad: Matrices,
    schedule: Schedule | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Split:
    """Split `grad` at `point` by matrix products only.

    `Q_1 = E K^(-1/2)` with `E = G - W B` and `K = E^T E`. The inverse root of a Gram matrix
    magnifies rounding by up to the condition number that it resolves, so a Newton-Schulz step on
    the measured Gram matrix of `Q_1` makes it orthonormal again.

    Args:
      point: `W`, tall or square.
      grad: `G`, with entries of moderate size (see `scale_to_unit_exponent`).
      schedule: drives the inverse root of `K`; None: the default for the precision.
      precision: the precision of float32 products on accelerators. Below `HIGHEST` a Gram matrix
        resolves too few singular values, and `Q_1` is iterated on `E` itself.
    """
    inner = arrays.product(point.mT, grad, tangent_precision(precision))
    outer = grad - arrays.product(point, inner, tangent_precision(precision))
    if precision == jax.lax.Precision.HIGHEST:
        rough = outer @ inverse_sqrt(outer.mT @ outer, schedule or SPLIT_SCHEDULE)
    else:
        rough = NewtonSchulz(schedule or ROUNDED_SCHEDULE, precision=precision).polar(outer)
    overlap = point.mT @ rough
    gram = arrays.sym(rough.mT @ rough - overlap.mT @ overlap)
    exact = polish(gram, precision)
    normal = exact @ (rough.mT @ outer)
    missing = outer - rough @ (exact @ normal)
    defect = math.sqrt(missing.shape[-1]) * arrays.frobenius_norm(missing)
    return Split(point, inner, normal, rough, overlap, exact, defect)


def tangent_residual(inner: Squares) -> Numbers:
    """Return `||W^T A + A^T W||_F / n`, given `W^T A`."""
    return 2 * arrays.frobenius_norm(arrays.sym(inner)) / max(inner.shape[-1], 1)


def tangent_precision(precision: jax.lax.Precision) -> jax.lax.Precision:
    """Return the precision for the tangent part of a gradient if the rest takes `precision`.

    The tangent part is a difference, small near a critical point: in one pass of bfloat16 a tangent
    part of a hundredth of the gradient would be noise.
    """
    low = precision == jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGH if low else precision


def is_noise(
    length: Numbers, grad: Matrices, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> Bool[Array, "*batch"]:
    """Return whether a tangent part of this Frobenius norm is rounding of a normal gradient.

    At a critical point `G = W S` with symmetric `S`; a full step along noise would be absurd.
    """
    eps = arrays.product_eps(tangent_precision(precision), grad.dtype)
    return length <= 8 * eps * arrays.frobenius_norm(grad)


def duality_gap(
    upper: Numbers,
    value: Numbers,
    grad: Matrices,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Numbers:
    """Return the relative duality gap, including rounding errors in the tangent part of `grad`.

    An entry of `W^T G` is off by less than a unit of rounding times the length of a column of `G`,
    so the nuclear norm of the error is at most `n` such units: little, unless the gradient is
    nearly normal to the set.

    `upper` bounds the optimum and `value` is `<G, A>` of the direction, both in exact arithmetic.
    They were computed from `grad`, of moderate size, by products of this precision.
    """
    size = arrays.frobenius_norm(grad)
    eps = arrays.product_eps(tangent_precision(precision), grad.dtype)
    noise = (min(grad.shape[-2:]) + 4) * eps * size
    total = jnp.where(size == 0, 0, jnp.where(value == 0, 1, upper + noise))
    return arrays.relative_gap(total, jnp.where(value == 0, 0, value - noise))


def tangent_parts(
    point: Matrices, grad: Matrices, precision: jax.lax.Precision = jax.lax.Precision.HIGHEST
) -> tuple[Float[Array, "*batch k k"], Matrices]:
    """Return `(Omega, E)`, with `W Omega + E` the tangent part of a gradient.

    Omega is skew and `W^T E = 0`. Wide points are treated as their transposes, and so is their E.

    If E is a small part of the gradient, the component along W left by rounding matters: two more
    products remove it.
    """
    precision = tangent_precision(precision)
    inner = arrays.gram_matrix(point, grad, precision)
    along, outer = arrays.skew(inner), grad - arrays.right_multiply(point, inner, precision)

    def again(outer):
        left = arrays.gram_matrix(point, outer, precision)
        return outer - arrays.right_multiply(point, left, precision)

    # ||E||^2 = ||G||^2 - ||W^T G||^2
    whole, normal = (arrays.frobenius_norm(x) ** 2 for x in (grad, inner))
    small = (1 - _SMALL_PART**2) * whole < normal
    return along, jax.lax.cond(jnp.any(small), again, lambda outer: outer, outer)
