"""Learning-rate transfer: the best rate of a grid, how far it drifts with size, and why.

For each seed, a parabola through the logarithm of the loss at the best rate of the grid and at its
two neighbours, over log2 of the rate; its lowest point is the seed's best rate. The seeds give
mean and interval. An end of the grid is not a best rate: it only says on which side to look.

The coordinate check compares how far the features of each layer move in the first steps. If the
sizes of updates suit the architecture, they move equally far at every width: the slope of
log2(change) against log2(width) is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.lab._intervals import Numbers, difference_estimate, mean_estimate, slope_estimate
from manifoldmuon.modules import Compose, Module

HALF_AN_OCTAVE = 0.5

Losses = Sequence[float | int | None]


class BestRate(NamedTuple):
    """The best rate over seeds.

    Attributes:
      log2_rate: the mean over seeds; None where a seed has its lowest point at an end of the grid.
      interval: its 95 % interval; None as well for a single seed.
      edge: "below" or "above", or both, where the grid ends too early, else "".
      by_seed: None where the grid ends.
    """

    log2_rate: float | None
    interval: tuple[float, float] | None
    edge: str
    by_seed: list[float | None]


def best_rate(log2_rates: Numbers, losses: Sequence[Losses]) -> BestRate:
    """Lowest loss of a sweep over learning rates, and its rate.

    For each seed, a parabola goes through the logarithm of the loss at the best rate of the grid
    and its two neighbours; its lowest point is the seed's best rate.

    Args:
      log2_rates: ascending; those of the grid.
      losses: one curve for each seed, positive; None or not finite where training broke down.
    """
    found = [_lowest(log2_rates, curve) for curve in losses]
    edges = sorted({point.edge for point in found} - {""})
    by_seed = [point.exponent for point in found]
    if edges:
        return BestRate(None, None, " and ".join(edges), by_seed)
    middle = mean_estimate([e for e in by_seed if e is not None])
    return BestRate(middle.value, middle.interval, "", by_seed)


class RateDrift(NamedTuple):
    """How the best rate moves with size.

    Attributes:
      octaves_per_doubling: the slope of log2(rate) over log2(size), through all seeds of all
        sizes that have a number.
      interval: its 95 % interval: a bend widens it, as noise does.
      span: octaves from the smallest size to the largest; None if one of them has no number.
      span_interval: its 95 % interval.
      steady: whether the span is within half an octave: "yes" or "no" where the whole interval is
        inside or outside, else "open".
    """

    octaves_per_doubling: float | None
    interval: tuple[float, float] | None
    span: float | None
    span_interval: tuple[float, float] | None
    steady: str


def rate_drift(best: Mapping[int, BestRate]) -> RateDrift:
    """How the best rate moves, from that of every size.

    Args:
      best: by size.
    """
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


def excess_loss(log2_rates: Numbers, losses: Losses, at: float) -> float | None:
    """How much the logarithm of the loss at a rate lies above the lowest point of the curve.

    The price of a rate that was tuned elsewhere. Between the rates of the grid, the parabola
    through the three nearest is taken.

    Args:
      log2_rates: ascending; those of the grid.
      losses: of one seed, positive; None or not finite where training broke down.
      at: log2 of the rate.

    Returns:
      The difference, None where the curve has its lowest point at an end of the grid.
    """
    best = _lowest(log2_rates, losses).exponent
    if best is None:
        return None
    heights = _heights(losses)

    def height(exponent: float) -> float:
        nearest = int(np.argmin(np.abs(np.subtract(log2_rates, exponent))))
        k = min(max(nearest, 1), len(heights) - 2)
        parabola = _parabola(log2_rates, heights, k)
        return float(np.polyval(parabola, exponent - log2_rates[k]))

    return height(at) - height(best)


class _Lowest(NamedTuple):
    """Find the minimum of one curve.

    Attributes:
      exponent: log2 of the rate; None at an end of the grid.
      edge: "below" or "above" where the grid ends too early, else "".
    """

    exponent: float | None
    edge: str


def _lowest(exponents: Numbers, losses: Losses) -> _Lowest:
    """The lowest point of one seed's curve.

    Args:
      exponents: log2 of the rates, ascending.
      losses: positive; None or not finite where training broke down: no better than the worst.
    """
    heights = _heights(losses)
    k = int(heights.argmin())
    if k in (0, len(heights) - 1):
        return _Lowest(None, "below" if k == 0 else "above")
    curvature, tilt, _ = _parabola(exponents, heights, k)
    # Three equal losses: anywhere is lowest.
    return _Lowest(float(exponents[k] - (tilt / (2 * curvature) if curvature else 0.0)), "")


def _heights(losses: Losses) -> np.ndarray:
    """The logarithms; zero where nothing is known."""
    values = np.array([np.nan if loss is None else loss for loss in losses], np.float64)
    fine = np.isfinite(values)
    return np.log(np.where(fine, values, values[fine].max())) if fine.any() else np.zeros(len(fine))


def _parabola(exponents: Numbers, heights: np.ndarray, k: int) -> np.ndarray:
    """The coefficients of the one through a point of the grid and its neighbours, around it."""
    near = slice(k - 1, k + 2)
    return np.polyfit(np.subtract(exponents[near], exponents[k]), heights[near], 2)


def feature_changes(
    network: Module, before: Any, after: Any, x: Any
) -> dict[str, Float[Array, ""]]:
    """By layer, the root mean square of the change of its output between two trees of weights.

    The layers are the top-level parts of the network that have weights, counted from 1 at the
    input; a stack of blocks is one.

    Args:
      network: whose features are compared.
      before: a tree of weights.
      after: another one, such as the same after a few steps.
      x: inputs.
    """
    pairs = zip(_features(network, before, x), _features(network, after, x), strict=True)
    moved = [jnp.sqrt(jnp.mean((new - old) ** 2)) for old, new in pairs]
    return {str(number): change for number, change in enumerate(moved, 1)}


def _features(network: Module, weights: Any, x: Any) -> list[Array]:
    if not isinstance(network, Compose):
        return [network.apply(weights, x)]
    found = []
    for part, own in zip(network.parts, weights, strict=True):
        x = part.apply(own, x)
        if part.mass > 0:
            found.append(x)
    return found
