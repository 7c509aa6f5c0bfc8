"""Learning-rate sweeps: the best rate, and the price of another rate.

For each seed, a parabola in log2 of the rate is fitted to the logarithm of the loss at the grid's
best rate and its two neighbours; its lowest point is the seed's best rate. An end of the grid is
not a best rate: it only shows on which side to extend the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

from manifoldmuon._internal.arguments import check_number, shown

Grid = Sequence[float | int] | Float[np.ndarray, " n"]
Losses = Sequence[float | int | None] | Float[np.ndarray, " n"]


class BestRate(NamedTuple):
    """The best rate over seeds.

    Attributes:
      log2_rate: mean over seeds; None if a seed has its lowest point at an end of the grid.
      interval: 95 % interval of the mean by Student's distribution; None also for a single seed.
      edge: "below", "above" or "above and below" if the grid ends too early there, else "".
      by_seed: log2 of each seed's best rate; None if the lowest point is at an end of the grid.
    """

    log2_rate: float | None
    interval: tuple[float, float] | None
    edge: str
    by_seed: list[float | None]


def best_rate(log2_rates: Grid, losses: Sequence[Any] | np.ndarray) -> BestRate:
    """Return the rate at the lowest loss of a sweep, by a parabola for each seed.

    Args:
      log2_rates: log2 of the grid's rates, ascending. If all rates are above 1, evenly spaced by a
        quarter or more: other positive numbers are taken for the rates themselves.
      losses: a curve for each seed, `(seeds, rates)`, positive; None or not finite where training
        diverged.

    Examples:
      >>> best_rate([-4, -3, -2, -1], [[0.9, 0.5, 0.5, 0.9]]).log2_rate
      -2.5
    """
    _check_grid("best_rate", log2_rates)
    if not len(losses):
        raise ValueError("best_rate(losses) must be a curve for each seed; got none")
    for seed, curve in enumerate(losses):
        _check_curve(f"best_rate(losses)[{seed}]", log2_rates, curve)
    minima = [_lowest(log2_rates, curve) for curve in losses]
    edges = sorted({edge for _, edge in minima} - {""})
    by_seed = [exponent for exponent, _ in minima]
    if edges:
        return BestRate(None, None, " and ".join(edges), by_seed)
    values = np.array(by_seed, np.float64)
    mean, interval = float(values.mean()), None
    if len(values) > 1:
        half = float(scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values))
        interval = (mean - half, mean + half)
    return BestRate(mean, interval, "", by_seed)


def excess_loss(log2_rates: Grid, losses: Losses, at: float) -> float | None:
    """Return how far the logarithm of the loss at a rate is above the lowest point of its curve.

    This is the price of a rate that was tuned elsewhere. Next to the lowest rate of the grid, the
    logarithm is on the parabola of `best_rate`, elsewhere on that of the three nearest rates, but
    between its neighbours on the grid.

    Args:
      log2_rates: log2 of the grid's rates, as for `best_rate`.
      losses: curve of a single seed, positive; None or not finite where training diverged.
      at: log2 of the rate, within the grid.

    Returns:
      The difference; None if the curve has its lowest point at an end of the grid.

    Examples:
      >>> round(excess_loss([-4, -3, -2, -1], [0.9, 0.5, 0.5, 0.9], at=-2.5), 6)
      0.0
    """
    _check_grid("excess_loss", log2_rates)
    _check_curve("excess_loss(losses)", log2_rates, losses)
    check_number("excess_loss(at)", at, within=f"[{float(log2_rates[0])}, {float(log2_rates[-1])}]")
    best, _ = _lowest(log2_rates, losses)
    if best is None:
        return None
    heights = _heights(losses)
    lowest = _least(losses)

    def height(exponent: float) -> float:
        nearest = int(np.argmin(np.abs(np.subtract(log2_rates, exponent))))
        right = int(np.clip(np.searchsorted(log2_rates, exponent), 1, len(heights) - 1))
        own = lowest in (right - 1, right)
        k = lowest if own else min(max(nearest, 1), len(heights) - 2)
        value = np.polyval(_parabola(log2_rates, heights, k), exponent - log2_rates[k])
        # Another parabola may have a minimum of its own, below the lowest point.
        ends = heights[right - 1 : right + 1]
        return float(value if own else np.clip(value, ends.min(), ends.max()))

    return height(at) - height(best)


def _check_grid(function: str, log2_rates: Grid) -> None:
    grid = np.asarray(log2_rates)
    numbers = grid.ndim == 1 and grid.size > 1 and np.issubdtype(grid.dtype, np.number)
    if not (numbers and np.isfinite(grid).all() and (np.diff(grid) > 0).all()):
        raise ValueError(
            f"{function}(log2_rates) must be two numbers or more, ascending; got "
            f"{shown(log2_rates)}"
        )
    steps = np.diff(grid)
    even = np.ptp(steps) <= 1e-6 * steps.max() and steps.min() >= 0.25
    if grid[0] > 0 and not even:
        raise ValueError(
            f"{function}(log2_rates) must be log2 of the rates; {shown(log2_rates)} look like the "
            "rates: give np.log2 of them"
        )


def _check_curve(name: str, log2_rates: Grid, losses: Any) -> None:
    if np.shape(losses) != np.shape(log2_rates):
        got = f"shape {shape}" if (shape := np.shape(losses)) else f"the number {losses}"
        raise ValueError(
            f"{name} must have a loss for each of the {len(log2_rates)} rates; got {got}. "
            "Curves are rows: (seeds, rates)"
        )
    values = _as_numbers(losses)
    if (values <= 0).any():
        raise ValueError(
            f"{name} must be positive, None where training diverged; got {np.nanmin(values):g}"
        )


def _lowest(exponents: Grid, losses: Losses) -> tuple[float | None, str]:
    """Return log2 of a seed's best rate, or None and the edge of the grid ("below", "above")."""
    heights, k = _heights(losses), _least(losses)
    if k in (0, len(heights) - 1):
        return None, "below" if k == 0 else "above"
    if not np.ptp(heights[k - 1 : k + 2]):
        return float(exponents[k]), ""
    curvature, tilt, _ = _parabola(exponents, heights, k)
    return float(exponents[k] - tilt / (2 * curvature)), ""


def _as_numbers(losses: Losses) -> np.ndarray:
    return np.array([np.nan if loss is None else loss for loss in losses], np.float64)


def _least(losses: Losses) -> int:
    """Return the index of the least finite loss; 0 if there is none."""
    values = _as_numbers(losses)
    return int(np.where(np.isfinite(values), values, np.inf).argmin())


def _heights(losses: Losses) -> np.ndarray:
    """Return logarithms of losses: the worst where training diverged, zeros if it always did."""
    values = _as_numbers(losses)
    fine = np.isfinite(values)
    return np.log(np.where(fine, values, values[fine].max())) if fine.any() else np.zeros(len(fine))


def _parabola(exponents: Grid, heights: np.ndarray, k: int) -> np.ndarray:
    """Return the parabola through a point of the grid, its origin, and the two neighbours."""
    near = slice(k - 1, k + 2)
    return np.polyfit(np.subtract(exponents[near], exponents[k]), heights[near], 2)
