"""Inverse roots of symmetric positive matrices by products alone, and msign from them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg._matrix import identity_like, mT, one_for_zero, product, sym
from manifoldmuon.linalg._newton_schulz import MsignMethod
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._polynomials import coupled_factor, polish, schatten_bound
from manifoldmuon.linalg._schedules import Schedule, check_schedule

# Relative ridge of a pass: above what rounding does to an eigenvalue of a float32 Gram matrix,
# so that none is negative (a negative one would grow without end).
_RIDGE = 1e-6


def inverse_root(
    gram: Float[Array, "*batch n n"], root: int = 2, steps: int = 24, ridge: float = 0.0
) -> Float[Array, "*batch n n"]:
    """`S^(-1/root)` by the coupled Newton iteration, by products alone.

    `T = ((p + 1) I - M) / p`, `X <- X T`, `M <- T^p M` from `M = S / c` (Lakić 1998; Higham,
    Functions of Matrices, 2008, sec. 7.3). With two roots of order 4 this is Shampoo's
    preconditioner: `(G G^T)^(-1/4) G (G^T G)^(-1/4) = msign(G)`.

    Args:
      gram: symmetric, positive definite, float32 or wider, its square within range.
      root: p, at least 1.
      steps: about `log(condition number) / (p log(1 + 1/p))`, and five more.
      ridge: this fraction of the (upper bound of the) largest eigenvalue is added to all of
        them. Positive where the matrix may be singular: an eigenvalue that rounding has made
        negative diverges once the steps are many.

    Returns:
      Symmetric.

    Raises:
      ValueError: `root` or `steps` below 1, `ridge` negative.
    """
    if root < 1 or steps < 1 or ridge < 0:
        raise ValueError(
            "root and steps must be at least 1 and ridge not negative; "
            f"got root={root!r}, steps={steps!r}, ridge={ridge!r}"
        )
    s = sym(gram)
    eye = identity_like(s)
    trace = one_for_zero(jnp.trace(s, axis1=-2, axis2=-1)[..., None, None])
    s = s / trace
    bound = one_for_zero(schatten_bound(product(s, s), 2))
    # The iteration converges for eigenvalues of M in (0, p + 1), the fastest near 1.
    shrink = 2 / (root + 1)
    m = (s / bound + ridge * eye) / shrink

    def step_of(m):
        return ((root + 1) * eye - m) / root

    def advance(_, carry):
        factor, step, m = carry
        m = sym(_conjugate(m, step, root))
        step = step_of(m)
        return sym(product(factor, step)), step, m

    first = step_of(m)
    factor, _, _ = jax.lax.fori_loop(1, steps, advance, (first, first, m))
    return factor / (bound * trace * shrink) ** (1 / root)


def _conjugate(m, step, root):
    """`T^p M` for commuting symmetric matrices, as `T M T ...`: what stays symmetric."""
    for _ in range(root // 2):
        m = product(product(step, m), step)
    return product(step, m) if root % 2 else m


DEFAULT_INVERSE_SQRT = PolarExpress(1e-3, safety=1.0001, cushion=0.05)
"""For eigenvalues down to a millionth of the bound, about where float32 still resolves them."""


def inverse_sqrt(
    gram: Float[Array, "*batch n n"],
    schedule: Schedule = DEFAULT_INVERSE_SQRT,
    bound: float | Float[Array, "*batch"] | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Float[Array, "*batch n n"]:
    """`S^(-1/2)` by the coupled iteration `S <- p(S) S p(S)`, `Q <- Q p(S)`.

    Each step acts on the square roots of the eigenvalues as the schedule's odd polynomial, so
    a schedule designed for `[lower, 1]` covers eigenvalues down to `lower**2 * bound`. Where
    all eigenvalues lie close to 1 (`I + V^T V` in a retraction) give the bound and a schedule
    of two or three steps.

    Args:
      gram: symmetric, positive semi-definite, float32 or wider; only its symmetric part counts.
        Neither its largest entry nor its size may over- or underflow when squared.
      schedule: the polynomials.
      bound: an upper bound of the largest eigenvalue, the tighter the better. None: the
        Schatten norm `||S^2||_F^(1/2)`, at most `n**(1/4)` times the largest eigenvalue.
      precision: the precision of float32 products on accelerators.

    Returns:
      Symmetric. Relative error of about `eps` times the condition number. Eigenvalues below the
      range of the schedule give finite values too small, and a zero matrix gives the finite
      multiple of the identity that the slopes of the schedule multiply to.

    Raises:
      TypeError: `schedule` is not a `Schedule`.
    """
    check_schedule("schedule", schedule)
    multiply = functools.partial(product, precision=precision)
    s = sym(gram)
    if bound is None:
        trace = one_for_zero(jnp.trace(s, axis1=-2, axis2=-1)[..., None, None])
        s = s / trace
        upper = one_for_zero(schatten_bound(multiply(s, s), 2))
        s, upper = s / upper, upper * trace
    else:
        upper = jnp.asarray(bound, s.dtype)[..., None, None]
        s = s / upper
    return sym(coupled_factor(s, schedule.coefficients, multiply)) / jnp.sqrt(upper)


@dataclasses.dataclass(frozen=True)
class InverseRoot(MsignMethod):
    """`X (X^T X)^(-1/2)` by `inverse_root`, in a few passes.

    As in `GramEigh` the squared condition number limits one pass: each adds a ridge and hands
    over a matrix that is conditioned a thousand times better. What the ridge of the last pass
    leaves is removed by a Newton-Schulz step.

    Attributes:
      steps: of the coupled iteration in each pass.
      passes: three reach a condition number of 1e6 in float32.
    """

    steps: int = 24
    passes: int = 3

    def __post_init__(self):
        if self.passes < 1 or self.steps < 1:
            raise ValueError(
                f"steps and passes must be at least 1; got {self.steps!r} and {self.passes!r}"
            )

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        for _ in range(self.passes):
            x = product(x, inverse_root(product(mT(x), x), 2, self.steps, _RIDGE))
        return polish(x)
