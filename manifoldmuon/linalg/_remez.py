"""Minimax odd polynomials: the best approximation of 1 on an interval, by the Remez exchange."""

import numpy as np
from numpy.polynomial import chebyshev, polynomial

_EXCHANGES = 100


def minimax_odd(lower: float, upper: float, degree: int) -> tuple[np.ndarray, float]:
    """The odd polynomial of this degree that is closest to 1 on `[lower, upper]`.

    With `degree = 2 d - 1` there are d coefficients, and the best polynomial is the one whose
    error takes its largest size with alternating signs at d + 1 points (Chebyshev). Both ends
    are among them and the other d - 1 are all the stationary points that an odd polynomial of
    this degree has, so each exchange finds them as the roots of the derivative.

    Written as `x q(x^2)` with q in the Chebyshev basis of `[lower^2, upper^2]`: the linear
    systems stay well conditioned for narrow intervals and for tiny `lower`.

    Args:
      lower: left end, positive.
      upper: right end, larger than `lower`.
      degree: odd, 3 or more.

    Returns:
      `(coefficients, error)`: those of `x, x^3, ...` in float64, and the largest `|1 - f|`.
    """
    d = (degree + 1) // 2
    middle, half = (upper**2 + lower**2) / 2, (upper**2 - lower**2) / 2
    points = (lower + upper) / 2 - (upper - lower) / 2 * np.cos(np.pi * np.arange(d + 1) / d)
    signs = (-1.0) ** np.arange(d + 1)
    error = np.inf
    for _ in range(_EXCHANGES):
        q, new_error = _interpolate(points, signs, middle, half)
        if abs(new_error - error) <= 1e-15:
            break
        error = new_error
        points = np.concatenate([[lower], _stationary(q, middle, half), [upper]])
    return _monomials(q, middle, half), abs(new_error)


def _interpolate(points, signs, middle, half):
    """The polynomial with `f(x_i) + (-1)^i E = 1` at every point, and that E."""
    basis = chebyshev.chebvander((points**2 - middle) / half, len(points) - 2)
    solution = np.linalg.solve(
        np.concatenate([points[:, None] * basis, signs[:, None]], axis=1), np.ones(len(points))
    )
    return solution[:-1], solution[-1]


def _stationary(q, middle, half):
    """Where `d/dx x q(x^2) = q + 2 t q'` is zero, t = x^2 = middle + half * s."""
    q = chebyshev.cheb2poly(q)
    slope = polynomial.polyadd(
        q, polynomial.polymul([middle, half], 2 * polynomial.polyder(q) / half)
    )
    return np.sqrt(middle + half * np.sort(polynomial.polyroots(slope).real))


def _monomials(q, middle, half):
    """The coefficients in powers of t."""
    total, power = np.zeros(len(q)), np.ones(1)
    for coefficient in chebyshev.cheb2poly(q):
        total[: len(power)] += coefficient * power
        power = polynomial.polymul(power, [-middle / half, 1 / half])
    return total
