"""The closed form: the steepest direction on the Stiefel manifold as a polar factor.

    A = msign(G W^T - W G^T) W,        <G, A> = || G W^T - W G^T ||_* / 2.

Why it is optimal. Write a feasible direction in an orthonormal basis [W, V] of the whole space:
`A = W X + V Y` with `X` skew and `[X; Y]` a contraction. Then `[X, -Y^T] = -[X; Y]^T` is a
contraction, too, and Parrott's theorem completes both to a contraction `[X, -Y^T; Y, Z]`. Negating
and transposing gives another completion, and the average of the two has a skew `Z`. So every
feasible `A` is `S W` for a skew contraction `S`, every skew contraction gives a feasible `S W`, and
`<G, S W> = <G W^T - W G^T, S> / 2` is largest, over skew contractions, at the polar factor.

For square `W` this is Bernstein's `W msign(W^T G - G^T W)`; for a single column it is the
normalised tangent part of the gradient. No dual variable is needed, neither for the direction nor
for its gap: the optimum itself is known, half the nuclear norm of `G W^T - W G^T`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.matrices.spectral import nuclear_parts
from manifoldmuon.linalg import MsignMethod, NewtonSchulz, PolarExpress, Schedule, SkewNewtonSchulz
from manifoldmuon.manifolds.solvers import _parts
from manifoldmuon.manifolds.solvers._resolvents import Resolvents
from manifoldmuon.manifolds.solvers._solver import SolverByPlatform, Steepest, StiefelSolver
from manifoldmuon.norms import Norm

# Six quintic steps: an error of 1e-5 on singular values down to 2e-3 of the Schatten norm.
SIGN_SCHEDULE = PolarExpress(2e-3, steps=6, safety=1.0001, cushion=0.03, contract=True)

# For products in a single pass of bfloat16. More steps are no more accurate: rounding lifts values
# above the interval of the next step, which has to be wider.
ROUNDED_SIGN_SCHEDULE = PolarExpress(5e-3, steps=5, safety=1.01, cushion=0.03, contract=True)

_FEW_COLUMNS = 64  # columns
_SMALL_LIFT = 80  # rows up to which the m x m lift is used: it is larger, but compiles faster


@dataclasses.dataclass(frozen=True)
class SkewPolar(StiefelSolver):
    """The closed form `A = msign(G W^T - W G^T) W` by products alone.

    When to use it: for a smaller gap than `ClosedForm`'s, which has fewer digits for tall points,
    and for float32 on accelerators. Singular values below about 2e-3 of the largest are not
    resolved and count in full in the gap: choose another method for these.

    For `m <= 2 n`, and for at most 80 rows with `m <= 3 n`, the polar factor is computed of the
    `m x m` matrix itself, for taller points of its `2n x 2n` representation
    `[W^T G - G^T W, -R^T; R, 0] / 2` in the basis of `split`.

    Attributes:
      method: the polar factor of the skew matrix; None: the default for the precision.
      schedule: drives the basis of tall points; None: the default for the precision.
      precision: the precision of float32 products on accelerators, except in a given method. Below
        `HIGHEST` the basis is iterated directly, and the method must suit rounded products, too.
    """

    method: MsignMethod | None = None
    schedule: Schedule | None = None
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    def __post_init__(self):
        if self.method is not None:
            MsignMethod.check("SkewPolar.method", self.method)
        if self.schedule is not None:
            Schedule.check("SkewPolar.schedule", self.schedule)
        arrays.check_precision("SkewPolar.precision", self.precision)

    def solve(self, norm: Norm, at: arrays.Matrices, grad: arrays.Matrices, dual: Any) -> Steepest:
        point, scaled = arrays.tall(at), arrays.tall(scale_to_unit_exponent(grad, ndim=2)[0])
        m, n = point.shape[-2:]
        with jax.default_matmul_precision(self.precision.name.lower()):
            if m <= max(2 * n, min(3 * n, _SMALL_LIFT)):
                parts, missed = None, 0
                lift = arrays.skew(
                    arrays.product(scaled, point.mT, _parts.tangent_precision(self.precision))
                )
            else:
                parts = _parts.split(point, scaled, self.schedule, self.precision)
                inner, half, missed = arrays.skew(parts.inner), parts.normal / 2, parts.defect
                lift = jnp.block([[inner, -half.mT], [half, jnp.zeros_like(half)]])
            # Not `msign`: the gradient is already scaled, and another pass over it takes time.
            sign = (self.method or _METHODS[self.precision]).polar(lift)
            still = _parts.is_noise(arrays.frobenius_norm(lift), scaled, self.precision)
            value = jnp.where(still, 0, arrays.inner_product(lift, sign))
            if self.precision == jax.lax.Precision.HIGHEST:
                # `nuclear_parts` with S^T S = -S S, which saves the memory passes of transposes and
                # signs.
                rest = arrays.frobenius_norm(lift + lift @ (sign @ sign))
                missed += math.sqrt(lift.shape[-1]) * rest
            else:  # rounding leaves the sign not exactly skew
                missed += nuclear_parts(lift, sign, self.precision)[1]
            gap = _parts.duality_gap(value + missed, value, scaled, self.precision)
            if parts is None:
                turn = arrays.skew(sign)
                # ||W^T sym(sign) W|| <= ||sym(sign)||, which saves two products.
                residual = 2 * arrays.frobenius_norm(sign - turn) / max(n, 1)
                direction = turn @ point
            else:
                inner, normal = sign[..., :n, :n], sign[..., n:, :n]
                residual = _parts.tangent_residual(inner)
                direction = parts.assemble(arrays.skew(inner), normal)
        direction = jnp.where(
            arrays.expand_trailing(still, 2), 0, arrays.match_orientation(direction, grad)
        )
        return Steepest(direction, dual, jnp.where(still, 0, residual), gap)


_METHODS = {p: NewtonSchulz(ROUNDED_SIGN_SCHEDULE, precision=p) for p in jax.lax.Precision} | {
    jax.lax.Precision.HIGHEST: SkewNewtonSchulz(SIGN_SCHEDULE)
}


@dataclasses.dataclass(frozen=True)
class ClosedForm(SolverByPlatform):
    """The closed form by the cheapest algorithm for the platform and the shape: the default.

    | platform | points | algorithm |
    |---|---|---|
    | CPU | at most 64 columns, or less than a third more rows than columns | `SkewPolar()` |
    | CPU | all others | `Resolvents()` |
    | accelerator | all | `SkewPolar(precision=Precision.DEFAULT)` |

    On CPUs, in float32, singular values below about 3e-3 of the largest are not brought all the way
    to 1, which costs about 1e-3 of the optimum on ill-conditioned gradients; the gap includes the
    loss. On accelerators products take one pass of bfloat16, which costs up to 1e-2. For smaller
    gaps use `SkewPolar()`, for less time `ProjectedPolar()`.

    The platform is the compilation target, which may be absent.

    Examples:
      >>> stiefel = mm.manifolds.Stiefel(solver=ClosedForm())  # the default
      >>> found = stiefel.steepest(jnp.eye(6, 4), jnp.arange(24.0).reshape(6, 4))
      >>> bool(found.gap < 1e-3)
      True
    """

    def choices(self, shape: tuple[int, ...]) -> tuple[StiefelSolver, StiefelSolver]:
        n, m = sorted(shape[-2:])
        return (_EXACT if n <= _FEW_COLUMNS or 3 * m < 4 * n else _RESOLVENTS), _ROUNDED


_EXACT, _RESOLVENTS = SkewPolar(), Resolvents()
_ROUNDED = SkewPolar(precision=jax.lax.Precision.DEFAULT)
