"""Sweeps over learning rates: the best rate, and what another rate costs.

For each seed, a parabola goes through the logarithm of the loss at the best rate of the grid and at
its two neighbours, over log2 of the rate; its lowest point is the seed's best rate. An end of the
grid is not a best rate: it only says on which side to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

Numbers = Sequence[float | int] | Float[np.ndarray, " n"]
Losses = Sequence[float | int | None]


class BestRate(NamedTuple):
    """The best rate over seeds.

    Attributes:
      log2_rate: the mean over seeds; None where a seed has its lowest point at an end of the grid.
      interval: its 95 % interval by Student's distribution; None as well for a single seed.
      edge: "below" or "above", or both, where the grid ends too early, else "".
      by_seed: None where the grid ends.

    Examples:
      >>> best_rate([-2, -1], [[0.9, 0.5]]).edge  # the grid ends too early
      'above'
    """

    log2_rate: float | None
    interval: tuple[float, float] | None
    edge: str
    by_seed: list[float | None]


def best_rate(log2_rates: Numbers, losses: Sequence[Losses]) -> BestRate:
    """Return the rate at the lowest loss of a sweep, by a parabola for each seed.

    Args:
      log2_rates: ascending; those of the grid.
      losses: one curve for each seed, positive; None or not finite where training broke down.

    Returns:
      A `BestRate`: log2 of the rate with its interval, or the edge where the grid ends too early.

    Examples:
      >>> best_rate([-4, -3, -2, -1], [[0.9, 0.5, 0.5, 0.9]]).log2_rate
      -2.5
    """
    found = [_lowest(log2_rates, curve) for curve in losses]
    edges = sorted({edge for _, edge in found} - {""})
    by_seed = [exponent for exponent, _ in found]
    if edges:
        return BestRate(None, None, " and ".join(edges), by_seed)
    values = np.array(by_seed, np.float64)
    mean, interval = float(values.mean()), None
    if len(values) > 1:
        half = float(scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values))
        interval = (mean - half, mean + half)
    return BestRate(mean, interval, "", by_seed)


def excess_loss(log2_rates: Numbers, losses: Losses, at: float) -> float | None:
    """Return how far the logarithm of the loss at a rate is above the lowest point of its curve.

    The price of a rate that was tuned elsewhere. Between the rates of the grid, the parabola
    through the three nearest is taken.

    Args:
      log2_rates: ascending; those of the grid.
      losses: of one seed, positive; None or not finite where training broke down.
      at: log2 of the rate.

    Returns:
      The difference, None where the curve has its lowest point at an end of the grid.

    Examples:
      >>> round(excess_loss([-4, -3, -2, -1], [0.9, 0.5, 0.5, 0.9], at=-2.5), 6)
      0.0
    """
    best, _ = _lowest(log2_rates, losses)
    if best is None:
        return None
    heights = _heights(losses)

    def height(exponent: float) -> float:
        nearest = int(np.argmin(np.abs(np.subtract(log2_rates, exponent))))
        k = min(max(nearest, 1), len(heights) - 2)
        parabola = _parabola(log2_rates, heights, k)
        return float(np.polyval(parabola, exponent - log2_rates[k]))

    return height(at) - height(best)


def _lowest(exponents: Numbers, losses: Losses) -> tuple[float | None, str]:
    """Return log2 of one seed's best rate, or None and the edge of the grid ("below", "above")."""
    heights = _heights(losses)
    k = int(heights.argmin())
    if k in (0, len(heights) - 1):
        return None, "below" if k == 0 else "above"
    curvature, tilt, _ = _parabola(exponents, heights, k)
    # Three equal losses: anywhere is lowest.
    return float(exponents[k] - (tilt / (2 * curvature) if curvature else 0.0)), ""


def _heights(losses: Losses) -> np.ndarray:
    """Return the logarithms: the worst where training broke down, zero where nothing is known."""
    values = np.array([np.nan if loss is None else loss for loss in losses], np.float64)
    fine = np.isfinite(values)
    return np.log(np.where(fine, values, values[fine].max())) if fine.any() else np.zeros(len(fine))


def _parabola(exponents: Numbers, heights: np.ndarray, k: int) -> np.ndarray:
    """Return the parabola around a point of the grid, through it and its neighbours."""
    near = slice(k - 1, k + 2)
    return np.polyfit(np.subtract(exponents[near], exponents[k]), heights[near], 2)
