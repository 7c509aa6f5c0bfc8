"""Inverse roots of symmetric positive matrices by products alone, and msign from them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.arrays import identity_like, mT, nonzero_or_one, product, sym
from manifoldmuon.linalg._msign import solve_lyapunov
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
    trace = nonzero_or_one(jnp.trace(s, axis1=-2, axis2=-1)[..., None, None])
    s = s / trace
    bound = nonzero_or_one(schatten_bound(product(s, s), 2))
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
        trace = nonzero_or_one(jnp.trace(s, axis1=-2, axis2=-1)[..., None, None])
        s = s / trace
        upper = nonzero_or_one(schatten_bound(multiply(s, s), 2))
        s, upper = s / upper, upper * trace
    else:
        upper = jnp.asarray(bound, s.dtype)[..., None, None]
        s = s / upper
    return sym(coupled_factor(s, schedule.coefficients, multiply)) / jnp.sqrt(upper)


# On accelerators, where E is what a product in float32 has given: all that is done to it multiplies
# what is small, so the errors are. Three passes of bfloat16 for what grows with E, one for what is
# below 0.025 always.
_in_three_passes = functools.partial(product, precision=jax.lax.Precision.HIGH)
_in_one_pass = functools.partial(product, precision=jax.lax.Precision.DEFAULT)


def largest_row_sum(x: Float[Array, "*batch n n"]) -> Float[Array, "*batch 1 1"]:
    """The largest absolute row sum, with two axes of length 1: it bounds the spectral norm.

    Args:
      x: matrices in the trailing two axes; leading axes are independent.
    """
    return jnp.max(jnp.sum(jnp.abs(x), axis=-1), axis=-1, initial=0)[..., None, None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def inverse_sqrt_minus_one(
    excess: Float[Array, "*batch n n"], max_iterations: int
) -> Float[Array, "*batch n n"]:
    """`(I + E)^{-1/2} - I` by products alone, with an error relative to its own size.

    The quintic Newton-Schulz step multiplies `S = I + E` on both sides by the Taylor polynomial
    `p = I - E/2 + 3/8 E^2` of its inverse root and collects the product of the `p`. Carrying
    `E`, `p - I` and `D = root - I` in place of `S`, `p` and the root keeps the identity out of
    the rounding errors: near it the result is three times as accurate. One product or two where E
    is small. The derivative, in either mode, is that of the exact root.

    Args:
      excess: E, symmetric, float32 or wider, its eigenvalues between -1 and 4/3.
      max_iterations: where the iteration gives up, as it does at an eigenvalue of -1.
    """
    # The series leave 5/16 E^3 and 63/256 E^5: 8e-9 and 3e-9, or 2e-17 in float64.
    near, close = (3e-3, 0.025) if excess.dtype == jnp.float32 else (4e-6, 6e-4)
    square = _in_one_pass(excess, excess)
    # A bound of the norm of E: tighter than the row sums of E itself by half or more.
    size = jnp.sqrt(largest_row_sum(square))

    def quadratic(excess, square):
        return 0.375 * square - 0.5 * excess

    def quartic(excess, square):
        rest = _in_one_pass(square, 35 / 128 * square - 5 / 16 * excess)
        return quadratic(excess, square) + rest

    def unfinished(carry):
        count, excess, _ = carry
        # A NaN compares false and ends the loop for its own matrix, not for the others.
        return (count < max_iterations) & jnp.any(largest_row_sum(excess) > close)

    def step(carry):
        count, excess, root = carry
        p = 0.375 * _in_three_passes(excess, excess) - 0.5 * excess
        root = root + p + _in_three_passes(root, p)
        square = 2 * p + _in_three_passes(p, p)
        excess = excess + square + _in_three_passes(excess, square)
        return count + 1, sym(excess), root

    def iterated(excess, _):
        start = (jnp.zeros((), jnp.int32), excess, jnp.zeros_like(excess))
        _, excess, root = jax.lax.while_loop(unfinished, step, start)
        last = quartic(excess, _in_one_pass(excess, excess))
        return root + last + _in_one_pass(root, last)

    # Steps of training end in the first two: one product or two.
    terms = sum((~jnp.all(size <= limit)).astype(jnp.int32) for limit in (near, close))
    return jax.lax.switch(terms, [quadratic, quartic, iterated], excess, square)


@inverse_sqrt_minus_one.defjvp
def _inverse_sqrt_minus_one_jvp(max_iterations, primals, tangents):
    """`H R' + R' H = -R E' R` with `H = R^-1`: the derivative of `R S R = I`."""
    (excess,), (tangent,) = primals, tangents
    found = inverse_sqrt_minus_one(excess, max_iterations)
    identity = identity_like(excess)
    inverse_root = identity + found
    root = sym(product(identity + excess, inverse_root))
    turned = product(inverse_root, product(sym(tangent), inverse_root))
    return found, solve_lyapunov(root, -turned)


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
        check_fields(self, steps="[1, inf)", passes="[1, inf)")

    def polar(self, x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        for _ in range(self.passes):
            x = product(x, inverse_root(product(mT(x), x), 2, self.steps, _RIDGE))
        return polish(x)
