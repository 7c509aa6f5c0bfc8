"""The inverse square root of symmetric positive matrices, by products alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import Numbers, Squares, nonzero_or_one, product, sym
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._polynomials import coupled_factor, schatten_bound
from manifoldmuon.linalg._schedules import Schedule

DEFAULT_INVERSE_SQRT = PolarExpress(1e-3, safety=1.0001, cushion=0.05)
"""For eigenvalues down to a millionth of the bound, about the resolution of float32."""


def inverse_sqrt(
    gram: Squares,
    schedule: Schedule = DEFAULT_INVERSE_SQRT,
    bound: float | Numbers | None = None,
    precision: jax.lax.Precision = jax.lax.Precision.HIGHEST,
) -> Squares:
    """Compute `S^(-1/2)` by the coupled iteration `S <- p(S) S p(S)`, `Q <- Q p(S)`.

    Each step applies the schedule's odd polynomial to the square roots of the eigenvalues, so a
    schedule designed for `[lower, 1]` covers eigenvalues down to `lower**2 * bound`. If all
    eigenvalues are close to 1 (`I + V^T V` in a retraction), give the bound and a schedule of two
    or three steps.

    Args:
      gram: S, symmetric, positive semi-definite, float32 or wider; only the symmetric part counts.
        Its trace must be a normal number, or zero.
      schedule: the polynomials.
      bound: an upper bound on the largest eigenvalue, a normal number, the tighter the better.
        None: the Schatten norm `||S^2||_F^(1/2)`, at most `n**(1/4)` times the largest eigenvalue.
      precision: the precision of float32 products on accelerators.

    Returns:
      A symmetric matrix. Its relative error is about `eps` times the condition number; with the
      default schedule in float64 at least 5e-10. Eigenvalues below the range of the schedule give
      finite values that are too small; a zero matrix gives the product of the schedule's slopes
      times the identity.

    Raises:
      TypeError: `schedule` is not a `Schedule`.

    Examples:
      >>> inverse_sqrt(4 * jnp.eye(2)).diagonal().round(4)
      Array([0.5, 0.5], dtype=float32)
    """
    Schedule.check("schedule", schedule)
    multiply = functools.partial(product, precision=precision)
    s = sym(gram)
    if bound is None:
        trace = nonzero_or_one(jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None])
        s = s / trace  # so that the squares below cannot overflow
        square = multiply(s, s)
        upper = nonzero_or_one(schatten_bound(square, 2))
        s, square, upper = s / upper, square / upper**2, upper * trace
    else:
        upper, square = jnp.asarray(bound, s.dtype)[..., None, None], None
        s = s / upper
    return sym(coupled_factor(s, schedule.coefficients, multiply, square)) / jnp.sqrt(upper)
