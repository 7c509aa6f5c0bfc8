"""The split of a gradient into its part along the point's columns and its part normal to them.

With an orthonormal basis `Q` of what `W` leaves over, `G = W B + Q R`, and every feasible
direction worth considering is `A = W X + Q Y`: from here on a solver meets only `n x n` matrices,
whatever the number of rows (Z = G + 2 W Lambda has the singular values of [B + 2 Lambda; R]).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import frobenius_norm, identity_like, mT, product, sym
from manifoldmuon.linalg import NewtonSchulz, PolarExpress, Schedule, inverse_sqrt
from manifoldmuon.manifolds.solvers._solver import tangent_precision

# For singular values down to 2e-3 of the bound. Rounding spoils some digits of the result; the
# polishing step brings them back.
SPLIT_SCHEDULE = PolarExpress(2e-3, steps=6, safety=1.0001, cushion=0.03)


class Split(NamedTuple):
    """`G = W inner + Q normal`, up to `defect`; `Q` is kept in factors, see `assemble`.

    Attributes:
      point: the point `W`.
      inner: `B = W^T G`.
      normal: `R = Q^T G`. Its Gram matrix is that of `G - W B`.
      rough: a tall `Q_1` that is orthonormal, and normal to `W`, only to a few digits.
      overlap: `W^T Q_1`.
      polish: `C` with `Q = (Q_1 - W overlap) C` orthonormal to rounding.
      defect: an upper bound on the nuclear norm of `G - W B - Q R`: the directions too small
        beside the others for float32 to tell from rounding, which `Q` leaves out.
    """

    point: Float[Array, "*batch m n"]
    inner: Float[Array, "*batch n n"]
    normal: Float[Array, "*batch n n"]
    rough: Float[Array, "*batch m n"]
    overlap: Float[Array, "*batch n n"]
    polish: Float[Array, "*batch n n"]
    defect: Float[Array, "*batch"]

    def assemble(
        self, inner: Float[Array, "*batch n n"], normal: Float[Array, "*batch n n"]
    ) -> Float[Array, "*batch m n"]:
        """`W inner + Q normal`."""
        polished = self.polish @ normal
        return self.point @ (inner - self.overlap @ polished) + self.rough @ polished


def split(
    point: Float[Array, "*batch m n"],
    grad: Float[Array, "*batch m n"],
    schedule: Schedule = SPLIT_SCHEDULE,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Split:
    """Splits `grad` at `point` by matrix products only.

    `Q_1 = E K^(-1/2)` with `E = G - W B` and `K = E^T E`. An inverse root of a Gram matrix
    magnifies rounding by up to the condition number that it resolves, so `Q_1` is measured as it
    came out, and one Newton-Schulz step on what was measured makes it orthonormal again.

    Args:
      point: `W`, tall or square, `W^T W = I`.
      grad: `G`, of the same shape, with entries of moderate size (see `scale_to_unit_exponent`).
      schedule: what drives the inverse root of `K`.
      precision: of float32 products on accelerators. Below `HIGHEST` a Gram matrix knows too few of
        the singular values, and `Q_1` is iterated on `E` itself.
    """
    inner = product(mT(point), grad, tangent_precision(precision))
    outer = grad - product(point, inner, tangent_precision(precision))
    if precision == jax.lax.Precision.HIGHEST:
        rough = outer @ inverse_sqrt(mT(outer) @ outer, schedule)
    else:
        rough = NewtonSchulz(schedule, precision=precision).polar(outer)
    overlap = mT(point) @ rough
    gram = sym(mT(rough) @ rough - mT(overlap) @ overlap)
    identity = identity_like(gram)
    polish = 15 / 8 * identity - 10 / 8 * gram + 3 / 8 * gram @ gram
    normal = polish @ (mT(rough) @ outer)
    missing = outer - rough @ (polish @ normal)
    defect = math.sqrt(missing.shape[-1]) * frobenius_norm(missing)
    return Split(point, inner, normal, rough, overlap, polish, defect)
