"""Enclosures of all singular values of a matrix, from any approximate decomposition.

Let `U diag(s) V^T` be approximate, U with k orthonormal columns up to `a >= ||U^T U - I||`, V
square up to `b >= ||V^T V - I||`, both below 1, and `r >= ||W - U diag(s) V^T||`. Then (similar
bounds: S. Rump, Verified bounds for singular values, BIT 51, 2011)

    s_i sqrt((1 - a)(1 - b)) - r  <=  sigma_i(W)  <=  s_i sqrt((1 + a)(1 + b)) + r.

Proof. The squared singular values of U are the eigenvalues of `U^T U`, within a of 1; for V they
are within b of 1. `sigma_i(U S V^T) <= ||U|| sigma_i(S V^T) <= ||U|| s_i ||V||`, since singular
values are distances from the matrices of lower rank. U has a left inverse of norm `1 /
sigma_min(U)`, so that `s_i = sigma_i(U^+ U S V^T V^-T) <= sigma_i(U S V^T) / (sigma_min(U)
sigma_min(V))`. By Weyl, W and `U S V^T` differ by at most r in each singular value.

The three norms are bounded by Frobenius norms of residuals, which are small only if their products
are more accurate than float64. Each factor is split into a head and a rest; the head lies on a grid
so coarse that products of heads are exact in every order of summation (K. Ozaki, T. Ogita, S.
Oishi, S. Rump, Error-free transformations of matrix multiplication, Numerical Algorithms 59, 2012).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from manifoldmuon_verify._rounding import DOUBLE, down, norm, product, total, up

# Larger entries are refused: scaling by powers of two could round, and no network needs them.
LARGEST = 2.0**256


class SingularValues(NamedTuple):
    """Bounds on the singular values of a matrix, in descending order.

    Attributes:
      lower: lower bounds, `(min(m, n),)`.
      upper: upper bounds, `(min(m, n),)`.
    """

    lower: np.ndarray
    upper: np.ndarray


def singular_values(matrix: np.ndarray) -> SingularValues:
    """Enclose all singular values of a float64 matrix `(m, n)` rigorously.

    The width of the intervals is about 1e-14 of the largest value; intervals of values near 0
    contain 0.

    Raises:
      ArithmeticError: entries are not finite, too large or of too different sizes, or the
        decomposition fails or is too inaccurate.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    largest = np.max(np.abs(tall), initial=0.0)
    if not largest <= LARGEST:
        raise ArithmeticError(f"entries must be finite, at most {LARGEST:.3g}; got {largest:.3g}")
    exponent = int(np.frexp(largest)[1])
    scaled = np.ldexp(tall, -exponent)
    if not np.array_equal(np.ldexp(scaled, exponent), tall):
        raise ArithmeticError("entries differ too much in size to be scaled exactly")
    try:
        left, values, right = np.linalg.svd(scaled, full_matrices=False)
    except np.linalg.LinAlgError as error:
        raise ArithmeticError(f"no singular value decomposition: {error}") from error
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right.T)
    values = np.sort(np.abs(values))[::-1]
    identity = np.eye(len(values))
    a = residual(identity, left.T, left)
    b = residual(identity, right.T, right)
    weighted = left * values
    # `left * values` is rounded once: its relative error is below 2 u.
    rounded = product(2 * DOUBLE.unit, total(norm(weighted), left.size * DOUBLE.tiny))
    r = total(residual(scaled, weighted, right.T), product(rounded, up(np.sqrt(1 + b))))
    if not (a < 0.5 and b < 0.5 and np.isfinite(r)):
        raise ArithmeticError("LAPACK returned singular vectors that are not orthonormal")
    least = down(np.sqrt(down(down(1 - a) * down(1 - b))))
    most = up(np.sqrt(product(up(1 + a), up(1 + b))))
    lower = np.ldexp(down(down(values * least) - r), exponent)
    upper = np.ldexp(total(product(values, most), r), exponent)
    # Scaling back may underflow.
    return SingularValues(np.maximum(down(lower), 0.0), up(upper))


def residual(target: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Bound the Frobenius norm of `target - first @ second` from above, for entries of about 1."""
    terms = first.shape[1]
    bits = (52 - int(np.ceil(np.log2(max(terms, 1))))) // 2
    head, rest = _split(first, bits)
    other_head, other_rest = _split(second, bits)
    gap = target - head @ other_head
    found = gap - (head @ other_rest + rest @ second)
    inexact = total(
        product(norm(head), norm(other_rest)),
        product(norm(rest), norm(second)),
        found.size * terms * DOUBLE.tiny,
    )
    return float(
        total(
            norm(found),
            product(DOUBLE.gamma(terms + 2), inexact),
            product(DOUBLE.gamma(3), total(norm(gap), norm(found))),
            found.size * terms * DOUBLE.tiny,
        )
    )


def _split(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Split `x = head + rest` exactly; head is a multiple of `2**(e - bits)`, `max |x| < 2**e`."""
    exponent = int(np.frexp(np.max(np.abs(x), initial=0.0))[1]) - bits
    head = np.ldexp(np.rint(np.ldexp(x, -exponent)), exponent)
    return head, x - head
