"""Means, differences and slopes with standard errors or with Student's intervals, at 95 %."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Numbers = Sequence[float | int] | Float[np.ndarray, " n"]


class Estimate(NamedTuple):
    """A number and the 95 % interval around it; None where there is too little to tell."""

    value: float
    interval: tuple[float, float] | None


def mean(values: Numbers) -> Estimate:
    """Of independent values, such as those of seeds."""
    middle, error, degrees = _moments(values)
    return _estimate(middle, error, degrees)


def mean_and_error(values: Numbers) -> tuple[float, float | None]:
    """The mean and its standard error, None for a single value."""
    middle, error, degrees = _moments(values)
    return middle, error if degrees else None


def difference(values: Numbers, others: Numbers) -> Estimate:
    """The mean of the values less that of the others; as many of each, and independent."""
    (one, one_error, degrees), (two, two_error, _) = _moments(values), _moments(others)
    return _estimate(one - two, float(np.hypot(one_error, two_error)), 2 * degrees)


def slope(x: Numbers, y: Numbers) -> Estimate:
    """Of the least-squares line: a bend widens the interval, as noise does."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    spread = float(np.sum((x - x.mean()) ** 2))
    value = float(np.sum((x - x.mean()) * (y - y.mean())) / spread)
    degrees = len(x) - 2
    residue = y - y.mean() - value * (x - x.mean())
    error = float(np.sqrt(np.sum(residue**2) / max(degrees, 1) / spread))
    return _estimate(value, error, degrees)


def reach(interval: Sequence[float | int | None] | None) -> float | None:
    """Half of the width of an interval, also of one from a record."""
    low, high = interval or (None, None)
    return None if low is None or high is None else (high - low) / 2


def shown(
    value: float | int | None, interval: Sequence[float | int | None] | None, form: str
) -> str:
    """The value and its reach as text; in a format with a sign, the sign is for the value."""
    if value is None:
        return "-"
    half = reach(interval)
    error = "" if half is None else f" ± {half:{form.lstrip('+')}}"
    return f"{value:{form}}{error}"


@functools.lru_cache(maxsize=256)
def student(degrees: int) -> float:
    """The t that a magnitude exceeds with probability 5 %.

    With `t = sqrt(n) tan(a)` the density is proportional to `cos(a) ** (n - 1)`.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(degrees) * np.tan(np.interp(0.95, mass / mass[-1], angles)))


def _moments(values: Numbers) -> tuple[float, float, int]:
    """Mean, its standard error, and the degrees of freedom."""
    array = np.asarray(values, np.float64)
    degrees = len(array) - 1
    with np.errstate(invalid="ignore"):  # a training may have diverged to infinity
        error = array.std(ddof=1) / np.sqrt(len(array)) if degrees else 0.0
        return float(array.mean()), float(error), degrees


def _estimate(value: float, error: float, degrees: int) -> Estimate:
    if degrees < 1:
        return Estimate(value, None)
    reach = student(degrees) * error
    return Estimate(value, (value - reach, value + reach))
