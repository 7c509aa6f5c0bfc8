"""The best learning rate of a grid, how sure it is, and how far it drifts with size.

For each seed, a parabola through the logarithm of the loss at the best rate of the grid and at its
two neighbours, over log2 of the rate; its lowest point is the seed's best rate. The seeds give
mean and interval. An end of the grid is no best rate: it only says on which side to look.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from manifoldmuon.lab._intervals import Numbers, difference, mean, slope

HALF_AN_OCTAVE = 0.5

Losses = Sequence[float | int | None]


class Lowest(NamedTuple):
    """Where one curve is lowest.

    Attributes:
      exponent: log2 of the rate; None at an end of the grid.
      edge: "below" or "above" where the grid ends too early, else "".
    """

    exponent: float | None
    edge: str


def lowest(exponents: Numbers, losses: Losses) -> Lowest:
    """The lowest point of one seed's curve.

    Args:
      exponents: log2 of the rates, ascending.
      losses: positive; None or not finite where training broke down: no better than the worst.
    """
    values = np.array([np.nan if loss is None else loss for loss in losses], np.float64)
    fine = np.isfinite(values)
    if not fine.any():
        return Lowest(None, "below")
    heights = np.log(np.where(fine, values, values[fine].max()))
    k = int(heights.argmin())
    if k in (0, len(heights) - 1):
        return Lowest(None, "below" if k == 0 else "above")
    curvature, tilt, _ = np.polyfit(np.subtract(exponents[k - 1 : k + 2], exponents[k]),
                                    heights[k - 1 : k + 2], 2)  # fmt: skip
    # Three equal losses: anywhere is lowest.
    return Lowest(float(exponents[k] - (tilt / (2 * curvature) if curvature else 0.0)), "")


def best_rate(exponents: Numbers, curves: Sequence[Losses]) -> Any:
    """The best rate over seeds, as a dictionary for a record.

    Args:
      exponents: log2 of the rates, ascending.
      curves: one for each seed.

    Returns:
      `by_seed`, and `log2_rate` with its 95 % `interval`, both None where a seed has its lowest
      point at an end of the grid; `edge` then says at which.
    """
    found = [lowest(exponents, curve) for curve in curves]
    edges = sorted({point.edge for point in found} - {""})
    by_seed = [point.exponent for point in found]
    if edges:
        return {"log2_rate": None, "interval": None, "edge": " and ".join(edges),
                "by_seed": by_seed}  # fmt: skip
    middle = mean([e for e in by_seed if e is not None])
    return {"log2_rate": middle.value, "interval": middle.interval, "edge": "", "by_seed": by_seed}


def drift(best: Mapping[int, Any]) -> dict[str, Any]:
    """How the best rate moves with size.

    Args:
      best: by size, what `best_rate` returns.

    Returns:
      `octaves_per_doubling`, the slope of log2(rate) over log2(size) through all seeds of all
      sizes that have a number, with its `interval`; `span`, in octaves from the smallest size to
      the largest, with its `span_interval`, None if one of them has no number; and `steady`:
      whether the span is within half an octave. "yes" and "no" are said where the whole interval
      is inside or outside, else "open".
    """
    known = {size: found["by_seed"] for size, found in best.items() if not found["edge"]}
    sizes = sorted(best)
    through = None
    if len(known) > 1:
        x = [np.log2(size) for size, values in known.items() for _ in values]
        through = slope(x, [value for values in known.values() for value in values])
    ends = [known.get(size) for size in (sizes[0], sizes[-1])]
    span = difference(ends[1], ends[0]) if ends[0] and ends[1] else None
    return {
        "octaves_per_doubling": through and through.value,
        "interval": through and through.interval,
        "span": span and span.value,
        "span_interval": span and span.interval,
        "steady": _steady(span and span.interval),
    }


def _steady(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "open"
    low, high = interval
    if low >= -HALF_AN_OCTAVE and high <= HALF_AN_OCTAVE:
        return "yes"
    return "no" if low > HALF_AN_OCTAVE or high < -HALF_AN_OCTAVE else "open"


def late(losses: Float[np.ndarray, "*rates steps"]) -> Float[np.ndarray, "*rates"]:
    """The smoothed loss: the mean of the last fifth of the steps."""
    keep = max(1, losses.shape[-1] // 5)
    return np.asarray(losses, np.float64)[..., -keep:].mean(axis=-1)
