"""Estimates over seeds: in records, in tables and pictures, and the effects of choices.

A record holds an estimate as an object with an `interval`, `[low, high]`, around a number that some
studies call `mean` and others `value`; each of them is None where there is none.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Float

Numbers = Sequence[float | int] | Float[np.ndarray, " n"]

Found = Mapping[str, Any]
"""An estimate from a record."""

Levels = tuple[str, ...]
"""One level for each factor: an arm."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error, which is None for a single seed."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """The mean of one or more independent values."""
        array = np.fromiter(values, np.float64)
        if not len(array):
            raise ValueError("values must hold at least one number; got none")
        with np.errstate(invalid="ignore"):  # a training may have diverged to infinity
            error = float(array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else None
            return cls(float(array.mean()), error)

    def text(self, form: str) -> str:
        """Both numbers in this format, or the mean alone; a sign is for the mean."""
        error = "" if self.error is None else f" ± {self.error:{form.lstrip('+')}}"
        return f"{self.mean:{form}}{error}"


class Estimate(NamedTuple):
    """A number and the 95 % interval around it, by Student's distribution.

    Attributes:
      value: the number.
      interval: its lower and its upper end; None where there are too few values to tell.
    """

    value: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, value: float, error: float, degrees: int) -> "Estimate":
        """The estimate of this standard error, with so many degrees of freedom."""
        if degrees < 1:
            return cls(value, None)
        half = float(scipy.stats.t.ppf(0.975, degrees)) * error
        return cls(value, (value - half, value + half))


def mean_estimate(values: Numbers) -> Estimate:
    """The mean of one or more independent values, such as those of seeds."""
    found = Mean.of(values)
    return Estimate.of(found.mean, found.error or 0.0, len(values) - 1)


def difference_estimate(values: Numbers, others: Numbers) -> Estimate:
    """The mean of the values less that of as many others, all of them independent."""
    one, two = Mean.of(values), Mean.of(others)
    error = math.hypot(one.error or 0.0, two.error or 0.0)
    return Estimate.of(one.mean - two.mean, error, 2 * (len(values) - 1))


def slope_estimate(x: Numbers, y: Numbers) -> Estimate:
    """The slope of the least-squares line: a bend widens the interval, as noise does."""
    line: Any = scipy.stats.linregress(x, y)
    return Estimate.of(float(line.slope), float(line.stderr), len(x) - 2)


def half_width(interval: Sequence[float | int | None] | None) -> float | None:
    """Half of the width of an interval: the number after ±; None where there is no interval."""
    low, high = interval or (None, None)
    return None if low is None or high is None else (high - low) / 2


def estimate(values: Sequence[float | None] | Float[np.ndarray, " seeds"]) -> dict[str, Any]:
    """The `mean` of the values and its `interval`, of Student's distribution at 95 %, for a record.

    Both are None if a value is missing; the interval is, too, if there is but one value.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "interval": None}
    found = mean_estimate(known)
    return {"mean": found.value, "interval": found.interval}


def shown(found: Found | None, form: str, unit: str = "") -> str:
    """An estimate as text, such as `0.12 ± 0.03`.

    Args:
      found: the estimate; None: there is none, which is a dash.
      form: the format of both numbers; a sign in it is for the first alone.
      unit: what follows.
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
    """Each seed's loss at the rate that is best for the other seeds, and the best rate for all.

    Rate and loss come from different seeds, so that no arm profits from the noise of a large grid.
    A single seed has no others and takes its own best. Losses that are not finite count as worse
    than all others.
    """
    worst = np.max(losses, initial=1.0, where=np.isfinite(losses))
    losses = np.where(np.isfinite(losses), losses, 10 * worst)
    others = losses.sum(axis=0) - losses if len(losses) > 1 else losses
    chosen = others.argmin(axis=1)
    return losses[np.arange(len(losses)), chosen], int(losses.mean(axis=0).argmin())


def gain(
    values: Mapping[Levels, Float[np.ndarray, " seeds"]], factor: int, level: str, without: str
) -> dict[str, Any]:
    """The decrease of the loss by a level of a factor, paired by seed.

    Args:
      values: by arm, the loss of every seed; every combination of levels.
      factor: which of the levels of an arm.
      level: the one that may buy something.
      without: the one that it is compared with.

    Returns:
      `mean` over the levels of the other factors, with its `interval` over seeds, and
      `by_arm`, the same for each of them. Positive numbers are gains.
    """
    by_arm, per_seed = {}, []
    for arm, loss in values.items():
        if arm[factor] == level:
            other = (*arm[:factor], without, *arm[factor + 1 :])
            per_seed.append(values[other] - loss)
            name = ", ".join(part for k, part in enumerate(arm) if k != factor)
            by_arm[name] = estimate(per_seed[-1])
    return estimate(np.mean(per_seed, axis=0)) | {"by_arm": by_arm}
