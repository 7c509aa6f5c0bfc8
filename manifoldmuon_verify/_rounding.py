"""Upper and lower bounds in float64 that account for all rounding errors.

Assumptions on the arithmetic: every operation rounds to nearest, with a relative error of at most
the unit roundoff; results below the smallest normal number may be off by that number (gradual
underflow, or a flush to zero); sums and matrix products add their terms in any order, fused or not.
Then a sum of n products is within `gamma(n)` times the sum of their magnitudes (N. Higham, Accuracy
and Stability of Numerical Algorithms, section 3.1).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A binary floating-point format.

    Attributes:
      unit: the unit roundoff.
      tiny: the smallest normal number.
    """

    unit: float
    tiny: float

    def gamma(self, terms: int) -> float:
        """Bound `n u / (1 - n u)`, the relative error of n consecutive roundings or n terms."""
        part = float(up(terms * self.unit))
        return float(up(part / down(1 - part))) if part < 1 else math.inf


DOUBLE = Arithmetic(2.0**-53, 2.0**-1022)
SINGLE = Arithmetic(2.0**-24, 2.0**-126)


def up(x: Any) -> Any:
    """Return the next larger number, which bounds the exact result of the operation giving `x`."""
    return np.nextafter(x, math.inf)


def down(x: Any) -> Any:
    """Return the next smaller number."""
    return np.nextafter(x, -math.inf)


def total(*terms: Any) -> Any:
    """Bound the sum of terms, each a number or an array of the same shape, from above."""
    result = terms[0]
    for term in terms[1:]:
        result = up(result + term)
    return result


def product(*factors: Any) -> Any:
    """Bound the product of nonnegative factors from above."""
    result = factors[0]
    for factor in factors[1:]:
        result = up(result * factor)
    return result


def norm(x: np.ndarray, start: int = 0) -> Any:
    """Bound the Euclidean norm over the axes from `start` on, from above."""
    count = math.prod(x.shape[start:])
    rows = x.reshape(*x.shape[:start], count)
    squares = total(np.einsum("...i,...i->...", rows, rows), count * DOUBLE.tiny)
    # Rounding the n squares needs no extra term: gamma(n) covers a sum of n products.
    return up(np.sqrt(up(squares / down(1 - DOUBLE.gamma(count)))))


def operator_norm(x: np.ndarray) -> float:
    """Bound the spectral norm of the magnitudes, and thus of the matrix, from above.

    Takes the smaller of the Frobenius norm and `sqrt(||x||_1 ||x||_inf)`.
    """
    magnitudes = np.abs(x)
    sides = [
        up(np.max(magnitudes.sum(axis), initial=0.0) / down(1 - DOUBLE.gamma(x.shape[axis])))
        for axis in (0, 1)
    ]
    return float(min(norm(x), up(np.sqrt(product(*sides)))))


def check_arithmetic() -> None:
    """Raise `ArithmeticError` if float64 does not round to nearest or flushes to zero."""
    one, half = np.ones(3), np.full(3, 2.0**-53)
    nearest = np.all(one + half == 1) and np.all(one + 1.5 * half == 1 + 2.0**-52)
    toward = np.all(-one - half == -1) and np.all(one - half / 4 == 1)
    if not (nearest and toward and np.all(np.full(3, DOUBLE.tiny) / 2 > 0)):
        raise ArithmeticError("float64 does not round to nearest here: no bound would hold")
