"""The inverse square root of symmetric positive matrices, by products alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Numbers, Squares
from manifoldmuon.linalg._newton_schulz import normalised
from manifoldmuon.linalg._polar_express import PolarExpress
from manifoldmuon.linalg._polynomials import coupled_factor
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
      default schedule in float64 at least 5e-10, and up to 1e-5 in derivatives. Eigenvalues below
      the range of the schedule give finite values that are too small; a zero matrix gives a large
      multiple of the identity.

    Examples:
      >>> inverse_sqrt(4 * jnp.eye(2)).diagonal().round(4)
      Array([0.5, 0.5], dtype=float32)
    """
    Schedule.check("schedule", schedule)
    arrays.check_square("inverse_sqrt(gram)", gram)
    multiply = functools.partial(arrays.product, precision=precision)
    steps = schedule.coefficients
    if bound is None:
        # The scale cancels; in float32 its derivative, of the square, would overflow.
        size = jax.lax.stop_gradient(arrays.trace(gram)[..., None, None])
        scale = 1 / arrays.nonzero_or_one(size)
        s, square, inverse = normalised(arrays.sym(gram) * scale, 1.0, steps[0], multiply)
    else:
        scale = 1 / jnp.asarray(bound, gram.dtype)[..., None, None]
        s, square, inverse = arrays.sym(gram) * scale, None, 1.0
    return arrays.sym(coupled_factor(s, steps, multiply, square)) * (inverse * jnp.sqrt(scale))
