"""Drift of the best learning rate with size."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from manifoldmuon.lab import BestRate
from studies.estimates import difference_estimate, slope_estimate

HALF_AN_OCTAVE = 0.5


class RateDrift(NamedTuple):
    """Drift of the best rate with size.

    Attributes:
      octaves_per_doubling: the slope of log2(rate) over log2(size), through all seeds of all
        sizes with a best rate inside the grid.
      interval: the 95 % interval of the slope; curvature widens it like noise.
      span: octaves from the smallest size to the largest; None if the best rate of either is at
        the edge of the grid.
      span_interval: the 95 % interval of the span.
      steady: whether the span is within half an octave: "yes" or "no" if the whole interval is
        inside or outside, else "open".
    """

    octaves_per_doubling: float | None
    interval: tuple[float, float] | None
    span: float | None
    span_interval: tuple[float, float] | None
    steady: str


def rate_drift(best: Mapping[int, BestRate]) -> RateDrift:
    """Estimate the drift of the best rate, from the best rates by size."""
    known = {size: [e for e in found.by_seed if e is not None]
             for size, found in best.items() if not found.edge}  # fmt: skip
    sizes = sorted(best)
    through = None
    if len(known) > 1:
        x = [np.log2(size) for size, values in known.items() for _ in values]
        through = slope_estimate(x, [value for values in known.values() for value in values])
    ends = [known.get(size) for size in (sizes[0], sizes[-1])]
    span = difference_estimate(ends[1], ends[0]) if ends[0] and ends[1] else None
    return RateDrift(
        through and through.value,
        through and through.interval,
        span and span.value,
        span and span.interval,
        _steady(span and span.interval),
    )


def _steady(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "open"
    low, high = interval
    if low >= -HALF_AN_OCTAVE and high <= HALF_AN_OCTAVE:
        return "yes"
    return "no" if low > HALF_AN_OCTAVE or high < -HALF_AN_OCTAVE else "open"
