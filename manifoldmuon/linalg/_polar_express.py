"""Polar Express: the composition of odd polynomials that maps `[lower, 1]` closest to 1."""

import functools
import math
import operator

import numpy as np

from manifoldmuon.linalg._remez import minimax_odd
from manifoldmuon.linalg._schedule import Coefficients, Schedule

# Where an interval is narrower than this its best polynomial is the Taylor one to far more
# digits than float64 has left for the exchange (whose coefficients lose 1/width**(d-1)).
_TAYLOR = {
    3: (1e-7, (3 / 2, -1 / 2)),
    5: (1e-4, (15 / 8, -10 / 8, 3 / 8)),
    7: (1e-3, (35 / 16, -35 / 16, 21 / 16, -5 / 16)),
}

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
      degree: 3, 5 or 7.
      steps: how many; None: until the error is below 1e-7.
      safety: each step also covers values that rounding has lifted above the interval by this
        factor; 1.0001 suits float32, 1.01 bfloat16. The steps turn up steeply there: with 1.0
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
    return Schedule(tuple(head), _TAYLOR[degree][1])


def _best(low: float, high: float, degree: int) -> tuple[np.ndarray, float]:
    """The best step for `[low, high]` and its largest value there."""
    width, taylor = _TAYLOR[degree]
    if high - low < width * high:
        middle = (low + high) / 2
        step = np.array([c / middle ** (2 * k + 1) for k, c in enumerate(taylor)])
        return step, max(1.0, _value(step, high))
    step, error = minimax_odd(low, high, degree)
    return step, 1 + error


def _value(step: np.ndarray, x: float) -> float:
    return float(x * np.polynomial.polynomial.polyval(x * x, step))


def _check(lower, degree, steps, safety, cushion):
    if not 1e-12 <= lower < 1:
        raise ValueError(f"lower must be at least 1e-12 and below 1; got {lower!r}")
    if degree not in _TAYLOR:
        raise ValueError(f"degree must be 3, 5 or 7; got {degree!r}")
    if steps is not None and operator.index(steps) < 1:
        raise ValueError(f"steps must be at least 1; got {steps!r}")
    if not (1 <= safety <= 1.1 and math.isfinite(safety)):
        raise ValueError(f"safety must be between 1 and 1.1; got {safety!r}")
    if not 0 <= cushion < 0.5:
        raise ValueError(f"cushion must be at least 0 and below 0.5; got {cushion!r}")
