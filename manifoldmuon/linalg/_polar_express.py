"""Polar Express: the composition of odd polynomials that maps `[lower, 1]` closest to 1."""

import functools
import math
import operator

import numpy as np

from manifoldmuon.linalg._remez import minimax_odd
from manifoldmuon.linalg._schedule import Coefficients, Schedule

_ENOUGH = 200  # steps that no design reaches


@functools.lru_cache(maxsize=256)
def polar_express(
    lower: float = 1e-3,
    degree: int = 5,
    steps: int | None = None,
    safety: float = 1.0,
    cushion: float = 0.0,
) -> Schedule:
    """Designs the schedule that brings singular values in `[lower, 1]` to 1 the fastest.

    Among all compositions of that many odd polynomials of that degree it has the smallest
    largest error, and the greedy choice achieves it: each step is the best approximation of 1
    on the interval that the steps before it have reached (Amsel, Persson, Musco, Gower, Polar
    Express, arXiv:2505.16932, theorem 3.1).

    Args:
      lower: the smallest singular value to be brought to 1, relative to the upper bound by
        which the matrix is divided. Smaller ones grow, but do not arrive.
      degree: odd, 3 or more: 5 is the usual choice; 9 does as much per product.
      steps: how many; None: until the error is below 1e-7.
      safety: each step also covers values that rounding has lifted above the interval by this
        factor; 1.001 suits float32, 1.01 bfloat16. The steps turn up steeply there: with 1.0
        a largest singular value that lies at the bound can escape after about seven steps.
      cushion: treat the interval as if it reached no further down than this fraction of its
        upper end. The optimal first steps have valleys as low as their lowest value, so they
        also map some large singular values to tiny ones; a cushion lifts the valleys for a
        little speed. The published coefficients have 0.02407327424182761.

    Returns:
      The schedule, its tail the Taylor polynomial of that degree. Cached.

    Raises:
      ValueError: an argument out of range.
    """
    _check(lower, degree, steps, safety, cushion)
    head: list[Coefficients] = []
    low, high = float(lower), 1.0
    for _ in range(_ENOUGH if steps is None else steps):
        step, top = _best(max(low, cushion * high), high * safety, degree)
        # With a cushion the step is centred on the wrong interval: centre it on the true one.
        centre = (_value(step, low) + top) / 2
        head.append(tuple(float(c / centre) for c in step))
        low = _value(step, low) / centre
        high = 2 - low
        if steps is None and high - 1 < 1e-7:
            break
    return Schedule(tuple(head), _taylor(degree))


def _best(low: float, high: float, degree: int) -> tuple[np.ndarray, float]:
    """The best step for `[low, high]` and its largest value there."""
    # Where an interval is so narrow, its best polynomial is the Taylor one to 12 digits, more than
    # float64 has left for the exchange (whose coefficients lose 1 / width**(terms - 1)).
    terms = (degree + 1) // 2
    if high - low < 10 ** (-12 / terms) * high:
        middle = (low + high) / 2
        step = np.array([c / middle ** (2 * k + 1) for k, c in enumerate(_taylor(degree))])
        return step, max(1.0, _value(step, high))
    step, error = minimax_odd(low, high, degree)
    return step, 1 + error


def _taylor(degree: int) -> Coefficients:
    """The odd polynomial that is flattest at 1: `x` times the expansion of `t^(-1/2)` at 1."""
    total = np.zeros(1)
    for k in range((degree + 1) // 2):
        power = np.polynomial.polynomial.polypow([1.0, -1.0], k)
        total = np.polynomial.polynomial.polyadd(total, math.comb(2 * k, k) / 4**k * power)
    return tuple(float(c) for c in total)


def _value(step: np.ndarray, x: float) -> float:
    return float(x * np.polynomial.polynomial.polyval(x * x, step))


def _check(lower, degree, steps, safety, cushion):
    if not 1e-12 <= lower < 1:
        raise ValueError(f"lower must be at least 1e-12 and below 1; got {lower!r}")
    if operator.index(degree) < 3 or degree % 2 == 0:
        raise ValueError(f"degree must be odd and at least 3; got {degree!r}")
    if steps is not None and operator.index(steps) < 1:
        raise ValueError(f"steps must be at least 1; got {steps!r}")
    if not (1 <= safety <= 1.1 and math.isfinite(safety)):
        raise ValueError(f"safety must be between 1 and 1.1; got {safety!r}")
    if not 0 <= cushion < 0.5:
        raise ValueError(f"cushion must be at least 0 and below 0.5; got {cushion!r}")
