"""The closed form: the steepest direction on the Stiefel manifold as one polar factor.

    A = msign(G W^T - W G^T) W,        <G, A> = || G W^T - W G^T ||_* / 2.

Why it is optimal. Write a feasible direction in an orthonormal basis [W, V] of the whole space:
`A = W X + V Y` with `X` skew and `[X; Y]` a contraction. Then `[X, -Y^T] = -[X; Y]^T` is one too,
and Parrott's theorem completes the two to a contraction `[X, -Y^T; Y, Z]`. Negating and
transposing such a completion gives another, and so does their average, whose `Z` is skew. So every
feasible `A` is `S W` for a skew contraction `S`, every skew contraction gives a feasible `S W`, and
`<G, S W> = <G W^T - W G^T, S> / 2` is largest, over skew contractions, at the polar factor.

For square `W` this is Bernstein's `W msign(W^T G - G^T W)`; for one column it is the normalised
tangent part of the gradient. No dual variable is needed, neither for the direction nor for the
certificate: the optimum itself is known, half the nuclear norm of `G W^T - W G^T`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import (
    check_precision,
    frobenius_norm,
    gram_matrix,
    identity_like,
    inner_product,
    match_orientation,
    mT,
    product,
    right_multiply,
    safe_sqrt,
    skew,
    tall,
)
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent
from manifoldmuon._internal.spectral import largest_eigenpair
from manifoldmuon.linalg import (
    MsignMethod,
    NewtonSchulz,
    PolarExpress,
    Schedule,
    SkewNewtonSchulz,
    inverse_sqrt,
)
from manifoldmuon.manifolds.solvers._solver import (
    MemorylessSolver,
    Steepest,
    certify,
    is_noise,
    nuclear_bound,
    raise_of,
    tangent_parts,
    tangent_precision,
    tangent_residual,
)
from manifoldmuon.manifolds.solvers._split import SPLIT_SCHEDULE, split

# Six quintic steps: an error of 1e-5 on singular values down to 2e-3 of the Schatten norm.
SIGN_SCHEDULE = PolarExpress(2e-3, steps=6, safety=1.0001, cushion=0.03, contract=True)

# Three steps of degree 9 end 0.004 from 1, as many products of quintics 0.013 from it. The Gram
# matrix is never formed anew, so its rounding errors, 1e-7 of its largest entry, must not be
# magnified to order 1: singular values below 1e-2 are left short.
COARSE_SCHEDULE = PolarExpress(1e-2, degree=9, steps=3, safety=1.0001, cushion=0.03)

# Products in one pass of bfloat16: more steps gain nothing, and each has to keep back what rounding
# has lifted above its interval.
ROUNDED_SCHEDULE = PolarExpress(1e-2, steps=4, safety=1.01, cushion=0.03, contract=True)
ROUNDED_SIGN_SCHEDULE = PolarExpress(5e-3, steps=5, safety=1.01, cushion=0.03, contract=True)


@dataclasses.dataclass(frozen=True)
class SkewPolar(MemorylessSolver):
    """The closed form `A = msign(G W^T - W G^T) W`: exact, without a dual variable, products only.

    For `m <= 2 n` the polar factor is taken of the `m x m` matrix itself, for taller points of its
    `2n x 2n` representation `[W^T G - G^T W, -R^T; R, 0] / 2` in the basis of `split`. Its gap is
    what float32 and the schedule leave: singular values smaller than about 2e-3 of the largest
    are not resolved, and count in full against the certificate.

    Attributes:
      method: the polar factor of the lifted matrix.
      schedule: drives the inverse root inside `split`.
      precision: of float32 products on accelerators, other than those of the method. Below
        `HIGHEST` the basis is iterated directly; the method must be one for rounded products, too.
    """

    method: MsignMethod = SkewNewtonSchulz(SIGN_SCHEDULE)
    schedule: Schedule = SPLIT_SCHEDULE
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    wide: ClassVar[bool] = True

    def __post_init__(self):
        MsignMethod.check("SkewPolar.method", self.method)
        Schedule.check("SkewPolar.schedule", self.schedule)
        check_precision("SkewPolar.precision", self.precision)

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Any,
    ) -> Steepest:
        high, scaled = tall(point), tall(scale_to_unit_exponent(grad, ndim=2)[0])
        m, n = high.shape[-2:]
        lifted = self._square if m <= 2 * n else self._tall
        with jax.default_matmul_precision(self.precision.name.lower()):
            direction, residual, gap = lifted(high, scaled)
        return Steepest(match_orientation(direction, grad), dual, residual, gap)

    def _square(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        lift = 2 * skew(product(grad, mT(point), tangent_precision(self.precision)))
        sign = self._sign(lift, grad)
        upper, value = self._bound(lift, sign), inner_product(lift, sign)
        turn = skew(sign)
        # ||W^T sym(sign) W|| <= ||sym(sign)||, which saves two products.
        residual = 2 * frobenius_norm(sign - turn) / max(point.shape[-1], 1)
        # The optimum is half the nuclear norm of this lift.
        return turn @ point, residual, certify(upper / 2, value / 2, grad, self.precision)

    def _tall(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        n = point.shape[-1]
        parts = split(point, grad, self.schedule, self.precision)
        top = jnp.concatenate([skew(parts.inner), -mT(parts.normal) / 2], axis=-1)
        bottom = jnp.concatenate([parts.normal / 2, jnp.zeros_like(parts.normal)], axis=-1)
        lift = jnp.concatenate([top, bottom], axis=-2)
        sign = self._sign(lift, grad)
        upper = self._bound(lift, sign) + parts.defect
        value = inner_product(lift, sign)
        inner, normal = sign[..., :n, :n], sign[..., n:, :n]
        direction = parts.assemble(skew(inner), normal)
        gap = certify(upper, value, grad, self.precision)
        return direction, tangent_residual(inner), gap

    def _sign(
        self, lift: Float[Array, "*batch k k"], grad: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch k k"]:
        """The polar factor, but zero where the lift is nothing but rounding."""
        still = is_noise(frobenius_norm(lift), grad, self.precision)[..., None, None]
        # Not `msign`: the gradient has been scaled already, and another pass over it takes time.
        return jnp.where(still, 0, self.method.polar(lift))

    def _bound(
        self, lift: Float[Array, "*batch k k"], sign: Float[Array, "*batch k k"]
    ) -> Float[Array, "*batch"]:
        if self.precision != jax.lax.Precision.HIGHEST:  # the sign is less than skew
            return nuclear_bound(lift, sign, self.precision)
        # The same, with S^T S = -S S: transposes and signs take passes over memory.
        missed = frobenius_norm(lift + lift @ (sign @ sign))
        return inner_product(lift, sign) + math.sqrt(lift.shape[-1]) * missed


@dataclasses.dataclass(frozen=True)
class ProjectedPolar(MemorylessSolver):
    """`msign(G - W sym(W^T G))`, projected and shortened to norm 1 where that is needed.

    The cheap preset: three tall products more than an unconstrained direction, everything else
    in `n x n`. It is exact for square points and where `Q^T G` is so well conditioned that the sign
    stays tangent; on ill-conditioned gradients it leaves several percent of the optimum.

    Attributes:
      schedule: drives the inverse root of the Gram matrix.
      precision: of float32 products on accelerators. Below `HIGHEST` the schedule is applied to the
        tangent part itself, in some more products: its Gram matrix would know singular values down
        to a tenth of the largest only.
    """

    schedule: Schedule = COARSE_SCHEDULE
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST

    wide: ClassVar[bool] = True

    def __post_init__(self):
        Schedule.check("ProjectedPolar.schedule", self.schedule)
        check_precision("ProjectedPolar.precision", self.precision)

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Any,
    ) -> Steepest:
        exact = self.precision == jax.lax.Precision.HIGHEST
        if point.shape[-2] == point.shape[-1]:
            square = _SQUARE if exact else SkewPolar(self._rounded(), precision=self.precision)
            return square.solve(point, grad, dual)
        with jax.default_matmul_precision(self.precision.name.lower()):
            answer = (self._coupled if exact else self._direct)(
                point, scale_to_unit_exponent(grad, ndim=2)[0]
            )
        return answer._replace(dual=dual)

    def _coupled(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        """`[along; outer] root`, with the inverse root of the Gram matrix."""
        # The tangent part is W along + outer. A Gram matrix of G minus one of W B would be cheaper
        # by a product, and nothing but rounding where the tangent part is a small part of G.
        along, outer = tangent_parts(point, grad)
        normal = gram_matrix(outer, outer)
        # Raised by what rounding may have taken: the root must not be too large for `outer` itself.
        normal = normal + raise_of(normal) * identity_like(normal)
        gram = mT(along) @ along + normal
        still = is_noise(_root_of_trace(gram), grad)[..., None, None]
        root = inverse_sqrt(jnp.where(still, identity_like(gram), gram), self.schedule)
        root = jnp.where(still, 0, root)
        raw, rest = along @ root, root @ (normal @ root)
        upper = _trace_bound(gram, root, mT(raw) @ raw + rest)
        residual, turned = tangent_residual(raw), skew(raw)
        length = _length(mT(turned) @ turned + rest, 0.01)
        value = inner_product(along, turned / length) + inner_product(normal, root / length)
        direction = right_multiply(outer, root / length) + right_multiply(point, turned / length)
        return Steepest(direction, (), residual, certify(upper, value, grad))

    def _direct(self, point: Float[Array, "*batch m n"], grad: Float[Array, "*batch m n"]):
        """The schedule on `[along; outer]`, whose Gram matrix is formed anew in every step."""
        high, n = tall(point), min(point.shape[-2:])
        tangent = jnp.concatenate(tangent_parts(high, tall(grad), self.precision), axis=-2)
        still = is_noise(frobenius_norm(tangent), grad, self.precision)[..., None, None]
        sign = jnp.where(still, 0, self._rounded().polar(tangent))
        upper = nuclear_bound(tangent, sign, precision=self.precision)
        turned, away = skew(sign[..., :n, :]), sign[..., n:, :]
        length = _length(mT(turned) @ turned + mT(away) @ away, 0.02)
        turned, away = turned / length, away / length
        value = inner_product(tangent, jnp.concatenate([turned, away], axis=-2))
        residual = tangent_residual(sign[..., :n, :])
        gap = certify(upper, value, grad, self.precision)
        return Steepest(match_orientation(high @ turned + away, grad), (), residual, gap)

    def _rounded(self) -> NewtonSchulz:
        return NewtonSchulz(self.schedule, precision=self.precision)


# What square points take: singular values down to 1e-2 of the Schatten norm end above 0.99.
_SQUARE = SkewPolar(SkewNewtonSchulz(dataclasses.replace(COARSE_SCHEDULE, contract=True)))


def _trace_bound(
    gram: Float[Array, "*batch n n"],
    root: Float[Array, "*batch n n"],
    closed: Float[Array, "*batch n n"],
) -> Float[Array, "*batch"]:
    """`nuclear_bound` of a matrix x that is known by its Gram matrix and the inverse root of it.

    Args:
      gram: `x^T x`.
      root: R.
      closed: `R x^T x R`.
    """
    n = gram.shape[-1]
    slack = identity_like(gram) - closed
    # ||x slack||_F^2 = tr(slack x^T x slack); rounding may leave a small negative number.
    square = jnp.maximum(inner_product(slack, gram @ slack), 0)
    return inner_product(gram, root) + safe_sqrt(n * square)


def _root_of_trace(gram: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
    return safe_sqrt(jnp.trace(gram, axis1=-2, axis2=-1))


def _length(gram: Float[Array, "*batch n n"], margin: float) -> Float[Array, "*batch 1 1"]:
    """`max(1, ||A||_2)` from `A^T A`, with a margin for what Lanczos and rounded products miss.

    After 24 steps Lanczos is 0.3 % below the largest eigenvalue where they lie evenly in [0, 1],
    and closer where one stands out.
    """
    found = (1 + margin) * largest_eigenpair(gram, 24)[0][..., None, None]
    return jnp.sqrt(jnp.maximum(found, 1))
