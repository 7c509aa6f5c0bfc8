"""Polar Express: the composition of odd polynomials that maps `[lower, 1]` closest to 1.

The Remez exchange finds each polynomial, the best approximation of 1 on an interval.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.polynomial import chebyshev, polynomial

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon.linalg._schedules import Coefficients, Schedule

_ENOUGH = 200  # steps that no design reaches
_EXCHANGES = 100


@dataclasses.dataclass(frozen=True)
class PolarExpress(Schedule):
    """The fastest schedule to bring singular values in `[lower, 1]` to 1.

    It minimises the maximum error among all compositions of `steps` odd polynomials of this degree.
    The greedy choice is optimal: each step is the best approximation of 1 on the interval reached
    by the previous steps (Amsel, Persson, Musco, Gower, Polar Express, arXiv:2505.16932, theorem
    3.1). The polynomials are computed on first use and cached.

    Attributes:
      lower: the smallest singular value to bring to 1, relative to the upper bound by which the
        matrix is divided. Smaller values grow, but do not reach 1.
      degree: odd, 3 or more. 5 is the usual choice; 9 does as much per product.
      steps: number of steps; None: until the error is below 1e-7 or, with `safety`, as small as it
        gets (6e-7 for 1.02, 7e-5 for 1.1).
      safety: each step also covers values that rounding has lifted above the interval by this
        factor; 1.001 suits float32, 1.01 bfloat16. The polynomials rise steeply there: with 1.0
        a largest singular value at the bound can escape after about seven steps.
      cushion: smallest lower end of the interval, as a fraction of its upper end. The optimal first
        steps have valleys as low as their lowest value, so they also map some large singular values
        to tiny values; a cushion lifts the valleys and costs a little speed. The published
        coefficients have 0.02407327424182761.
      contract: divide the last step by its largest value: values end at or below 1 instead of
        around 1.

    Examples:
      >>> msign(jnp.eye(4, 3), NewtonSchulz(PolarExpress(lower=1e-3, steps=8))).shape
      (4, 3)
    """

    lower: float = 1e-3
    degree: int = 5
    steps: int | None = None
    safety: float = 1.0
    cushion: float = 0.0
    contract: bool = False

    def __post_init__(self):
        check_fields(self, lower="[1e-12, 1)", degree="[3, inf)", steps="[1, inf)")
        check_fields(self, safety="[1, 1.1]", cushion="[0, 0.5)")
        if self.degree % 2 == 0:
            raise ValueError(f"PolarExpress.degree must be odd; got {self.degree!r}")

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        return _design(self)

    def with_steps(self, steps: int) -> "PolarExpress":
        return dataclasses.replace(self, steps=steps)


@functools.lru_cache(maxsize=256)
def _design(wanted: PolarExpress) -> tuple[Coefficients, ...]:
    head: list[Coefficients] = []
    low, high = float(wanted.lower), 1.0
    for _ in range(_ENOUGH if wanted.steps is None else wanted.steps):
        covered = max(low, wanted.cushion * high), high * wanted.safety
        step, top = _best(*covered, wanted.degree)
        # With a cushion the step is centred on the wrong interval: centre it on the true interval.
        centre = (_value(step, low) + top) / 2
        head.append(tuple(float(c / centre) for c in step))
        before, low = low, _value(step, low) / centre
        high = 2 - low
        if wanted.steps is None and (high - 1 < 1e-7 or low < before * (1 + 1e-9)):
            break
    if wanted.contract:
        head[-1] = tuple(c / high for c in head[-1])
    return tuple(head)


def _best(low: float, high: float, degree: int) -> tuple[np.ndarray, float]:
    """Return the best step for `[low, high]` and its largest value there."""
    # On such a narrow interval the Taylor polynomial is the best to 12 digits; the exchange has
    # fewer digits in float64, since its coefficients lose a factor 1 / width**(terms - 1).
    terms = (degree + 1) // 2
    if high - low < 10 ** (-12 / terms) * high:
        middle = (low + high) / 2
        step = np.array([c / middle ** (2 * k + 1) for k, c in enumerate(_taylor(degree))])
        return step, max(1.0, _value(step, high))
    step, error = minimax_odd(low, high, degree)
    return step, 1 + error


def _taylor(degree: int) -> Coefficients:
    """Return the flattest odd polynomial at 1: `x` times the expansion of `t^(-1/2)` at 1."""
    total = np.zeros(1)
    for k in range((degree + 1) // 2):
        power = polynomial.polypow([1.0, -1.0], k)
        total = polynomial.polyadd(total, math.comb(2 * k, k) / 4**k * power)
    return tuple(float(c) for c in total)


def _value(step: np.ndarray, x: float) -> float:
    return float(x * polynomial.polyval(x * x, step))


def minimax_odd(lower: float, upper: float, degree: int) -> tuple[np.ndarray, float]:
    """Return the odd polynomial of this degree that is closest to 1 on `[lower, upper]`.

    With `degree = 2 d - 1` there are d coefficients. The error of the best polynomial takes its
    largest size, with alternating signs, at d + 1 points (Chebyshev): both ends and d - 1
    stationary points, all that an odd polynomial of this degree has for x > 0. Each exchange
    therefore takes the roots of the derivative.

    The polynomial is written as `x q(x^2)` with q in the Chebyshev basis of `[lower^2, upper^2]`:
    the linear systems stay well conditioned for narrow intervals and for tiny `lower`.

    Returns:
      `(coefficients, error)`: coefficients of `x, x^3, ...` in float64, and the largest `|1 - f|`.
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
    """Return the polynomial f and the number E with `f(x_i) + (-1)^i E = 1` at every point."""
    basis = chebyshev.chebvander((points**2 - middle) / half, len(points) - 2)
    solution = np.linalg.solve(
        np.concatenate([points[:, None] * basis, signs[:, None]], axis=1), np.ones(len(points))
    )
    return solution[:-1], solution[-1]


def _stationary(q, middle, half):
    """Return the zeros of `d/dx x q(x^2) = q + 2 t q'`, t = x^2 = middle + half * s."""
    q = chebyshev.cheb2poly(q)
    slope = polynomial.polyadd(
        q, polynomial.polymul([middle, half], 2 * polynomial.polyder(q) / half)
    )
    return np.sqrt(middle + half * np.sort(polynomial.polyroots(slope).real))


def _monomials(q, middle, half):
    """Return the coefficients in powers of t."""
    total, power = np.zeros(len(q)), np.ones(1)
    for coefficient in chebyshev.cheb2poly(q):
        total[: len(power)] += coefficient * power
        power = polynomial.polymul(power, [-middle / half, 1 / half])
    return total
