"""Means, differences and slopes with 95 % intervals of Student's distribution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Numbers = Sequence[float | int] | Float[np.ndarray, " n"]


class Estimate(NamedTuple):
    """A number and the 95 % interval around it.

    Attributes:
      value: the number.
      interval: its lower and its upper end; None where there are too few values to tell.
    """

    value: float
    interval: tuple[float, float] | None


def mean_estimate(values: Numbers) -> Estimate:
    """The mean of independent values, such as those of seeds.

    Args:
      values: one or more; a single one has no interval.

    Raises:
      ValueError: there are no values.
    """
    middle, error, degrees = _moments(values)
    return _estimate(middle, error, degrees)


def mean_and_standard_error(values: Numbers) -> tuple[float, float | None]:
    """The mean and its standard error, None for a single value.

    Args:
      values: one or more, independent.

    Raises:
      ValueError: there are no values.
    """
    middle, error, degrees = _moments(values)
    return middle, error if degrees else None


def difference_estimate(values: Numbers, others: Numbers) -> Estimate:
    """The mean of the values less that of the others.

    Args:
      values: independent of each other and of the others.
      others: as many as `values`. For pairs, such as two methods with the same seeds, take
        `mean_estimate` of the differences.
    """
    (one, one_error, degrees), (two, two_error, _) = _moments(values), _moments(others)
    return _estimate(one - two, float(np.hypot(one_error, two_error)), 2 * degrees)


def slope_estimate(x: Numbers, y: Numbers) -> Estimate:
    """The slope of the least-squares line: a bend widens the interval, as noise does.

    Args:
      x: two different numbers or more; with two there is no interval.
      y: as many.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    spread = float(np.sum((x - x.mean()) ** 2))
    value = float(np.sum((x - x.mean()) * (y - y.mean())) / spread)
    degrees = len(x) - 2
    residue = y - y.mean() - value * (x - x.mean())
    error = float(np.sqrt(np.sum(residue**2) / max(degrees, 1) / spread))
    return _estimate(value, error, degrees)


def half_width(interval: Sequence[float | int | None] | None) -> float | None:
    """Half of the width of an interval: the number after ±.

    Args:
      interval: of an `Estimate` or from a record, whose ends may be None.

    Returns:
      None where there is no interval.
    """
    low, high = interval or (None, None)
    return None if low is None or high is None else (high - low) / 2


@functools.lru_cache(maxsize=256)
def student_quantile(degrees: int) -> float:
    """The t of Student's distribution that a magnitude exceeds with probability 5 %.

    Args:
      degrees: of freedom, at least 1: one less than the number of values of a mean.

    Raises:
      ValueError: `degrees` is less than 1.
    """
    if degrees < 1:
        raise ValueError(f"degrees must be at least 1; got {degrees}")
    # With t = sqrt(n) tan(a) the density is proportional to cos(a) ** (n - 1).
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(degrees) * np.tan(np.interp(0.95, mass / mass[-1], angles)))


def _moments(values: Numbers) -> tuple[float, float, int]:
    """Mean, its standard error, and the degrees of freedom."""
    array = np.asarray(values, np.float64)
    if not len(array):
        raise ValueError("values must hold at least one number; got none")
    degrees = len(array) - 1
    with np.errstate(invalid="ignore"):  # a training may have diverged to infinity
        error = array.std(ddof=1) / np.sqrt(len(array)) if degrees else 0.0
        return float(array.mean()), float(error), degrees


def _estimate(value: float, error: float, degrees: int) -> Estimate:
    if degrees < 1:
        return Estimate(value, None)
    half = student_quantile(degrees) * error
    return Estimate(value, (value - half, value + half))
