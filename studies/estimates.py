"""Estimates over seeds, for records, tables and pictures.

In a record, an estimate is an object with a number, `mean` or `value` depending on the study, and
an `interval`, `[low, high]`; either may be None.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

Numbers = Sequence[float | int] | Float[np.ndarray, " n"]

Found = Mapping[str, Any]
"""An estimate from a record."""


class Estimate(NamedTuple):
    """A number and its 95 % interval, by Student's distribution.

    Attributes:
      value: the number.
      interval: the lower and upper end; None if there are too few values.
    """

    value: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, value: float, error: float, degrees: int) -> "Estimate":
        """Create an estimate from a standard error and its degrees of freedom."""
        if degrees < 1:
            return cls(value, None)
        half = float(scipy.stats.t.ppf(0.975, degrees)) * error
        return cls(value, (value - half, value + half))


def mean_estimate(values: Numbers) -> Estimate:
    """Estimate the mean of independent values, such as results of seeds; at least one."""
    return Estimate.of(*_mean_and_error(values), len(values) - 1)


def difference_estimate(values: Numbers, others: Numbers) -> Estimate:
    """Estimate mean(values) - mean(others), for equally many independent values in both."""
    (one, error), (two, other) = _mean_and_error(values), _mean_and_error(others)
    return Estimate.of(one - two, math.hypot(error, other), 2 * (len(values) - 1))


def slope_estimate(x: Numbers, y: Numbers) -> Estimate:
    """Estimate the slope of the least-squares line; curvature widens the interval like noise."""
    line: Any = scipy.stats.linregress(x, y)
    return Estimate.of(float(line.slope), float(line.stderr), len(x) - 2)


def _mean_and_error(values: Numbers) -> tuple[float, float]:
    """Return the mean and its standard error, 0 for a single value."""
    array = np.asarray(values, np.float64)
    if not len(array):
        raise ValueError("values must not be empty")
    with np.errstate(invalid="ignore"):  # a training may have diverged to infinity
        error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else 0.0
        return float(array.mean()), float(error)


def half_width(interval: Sequence[float | int | None] | None) -> float | None:
    """Return half the width of an interval, the number after ±; None without an interval."""
    low, high = interval or (None, None)
    return None if low is None or high is None else (high - low) / 2


def estimate(values: Sequence[float | None] | Float[np.ndarray, " seeds"]) -> dict[str, Any]:
    """Return the `mean` of the values and its 95 % Student `interval`, for a record.

    Both are None if any value is missing; the interval is None for a single value.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "interval": None}
    found = mean_estimate(known)
    return {"mean": found.value, "interval": found.interval}


def shown(found: Found | None, form: str, unit: str = "") -> str:
    """Format an estimate, such as `0.12 ± 0.03`.

    Args:
      found: the estimate; None becomes a dash.
      form: the format of both numbers; a sign applies to the first number only.
      unit: text appended to the numbers.
    """
    value = None if found is None else found["mean" if "mean" in found else "value"]
    if found is None or value is None:
        return "-"
    half = half_width(found["interval"])
    error = "" if half is None else f" ± {half:{form.lstrip('+')}}"
    return f"{value:{form}}{error}{unit}"


def at_best_rate(
    losses: Float[np.ndarray, "seeds rates"],
) -> tuple[Float[np.ndarray, " seeds"], int]:
    """Return each seed's loss at the best rate of the other seeds, and the index of the best rate
    over all seeds.

    Rate and loss come from different seeds, so that no arm profits from the noise of a large grid.
    A single seed uses its own best rate. Losses that are not finite are worse than all others.
    """
    worst = np.max(losses, initial=1.0, where=np.isfinite(losses))
    losses = np.where(np.isfinite(losses), losses, 10 * worst)
    others = losses.sum(axis=0) - losses if len(losses) > 1 else losses
    chosen = others.argmin(axis=1)
    return losses[np.arange(len(losses)), chosen], int(losses.mean(axis=0).argmin())
