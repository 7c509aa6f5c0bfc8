"""The closed form: the steepest direction on the Stiefel manifold as one matrix sign.

    A = msign(G W^T - W G^T) W,        <G, A> = || G W^T - W G^T ||_* / 2.

Why it is optimal. Write a feasible direction in an orthonormal basis [W, V] of the whole space:
`A = W X + V Y` with `X` skew and `[X; Y]` a contraction. Then `[X, -Y^T] = -[X; Y]^T` is one too,
and Parrott's theorem completes the two to a contraction `[X, -Y^T; Y, Z]`. Negating and
transposing such a completion gives another, and so does their average, whose `Z` is skew. So every
feasible `A` is `S W` for a skew contraction `S`, every skew contraction gives a feasible `S W`, and
`<G, S W> = <G W^T - W G^T, S> / 2` is largest, over skew contractions, at the matrix sign.

For square `W` this is Bernstein's `W msign(W^T G - G^T W)`; for one column it is the normalised
tangent part of the gradient. No dual variable is needed, neither for the direction nor for the
certificate: the optimum itself is known, half the nuclear norm of `G W^T - W G^T`.
"""

import dataclasses

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import (
    MsignMethod,
    NewtonSchulz,
    Schedule,
    mT,
    polar_express,
    prescale,
    skew,
)
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import (
    frobenius,
    inner_product,
    is_noise,
    nuclear_bound,
    relative_gap,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._solver import MemorylessSolver
from manifoldmuon.manifolds.solvers._split import SPLIT_SCHEDULE, split

# Six quintic steps: an error of 1e-5 on singular values down to 2e-3 of the Schatten norm.
SIGN_SCHEDULE = polar_express(2e-3, steps=6, safety=1.0001, cushion=0.03)


@dataclasses.dataclass(frozen=True)
class SkewLift(MemorylessSolver):
    """The closed form `A = msign(G W^T - W G^T) W`: exact, without a dual variable, products only.

    For `m <= 2 n` the matrix sign is taken of the `m x m` matrix itself, for taller points of its
    `2n x 2n` representation `[W^T G - G^T W, -R^T; R, 0] / 2` in the basis of `split`. Its gap is
    what float32 and the schedule leave: singular values smaller than about 2e-3 of the largest
    are not resolved, and count in full against the certificate.

    Attributes:
      method: the matrix sign of the lifted matrix.
      schedule: drives the inverse root inside `split`.
    """

    method: MsignMethod = NewtonSchulz(SIGN_SCHEDULE, gram=False, skew=True)
    schedule: Schedule = SPLIT_SCHEDULE

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        m, n = point.shape[-2:]
        lifted = self._square if m <= 2 * n else self._tall
        direction, residual, gap = lifted(point, prescale(grad, ndim=2)[0])
        return Steepest(direction, dual, residual, gap)

    def _square(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        lift = 2 * skew(grad @ mT(point))
        sign = self._sign(lift, grad)
        upper, value = nuclear_bound(lift, sign, -sign @ sign), inner_product(lift, sign)
        turn = skew(sign)
        # ||W^T sym(sign) W|| <= ||sym(sign)||, which saves two products.
        residual = 2 * frobenius(sign - turn) / max(point.shape[-1], 1)
        return turn @ point, residual, relative_gap(upper, value)

    def _tall(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        n = point.shape[-1]
        parts = split(point, grad, self.schedule)
        top = jnp.concatenate([skew(parts.inner), -mT(parts.normal) / 2], axis=-1)
        bottom = jnp.concatenate([parts.normal / 2, jnp.zeros_like(parts.normal)], axis=-1)
        lift = jnp.concatenate([top, bottom], axis=-2)
        sign = self._sign(lift, grad)
        upper = nuclear_bound(lift, sign, -sign @ sign) + parts.defect
        value = inner_product(lift, sign)
        inner, normal = sign[..., :n, :n], sign[..., n:, :n]
        direction = parts.assemble(skew(inner), normal)
        return direction, tangent_residual(inner), relative_gap(upper, value)

    def _sign(
        self, lift: Float[Array, "*batch k k"], grad: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch k k"]:
        """The matrix sign, but zero where the lift is nothing but rounding."""
        still = is_noise(frobenius(lift), grad)[..., None, None]
        # Not `msign`: the gradient has been scaled already, and another pass over it takes time.
        return jnp.where(still, 0, self.method.polar(lift))
