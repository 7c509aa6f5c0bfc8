"""Schedules of odd polynomials that drive the singular values of a matrix to 1, as data."""

from __future__ import annotations

import abc
import dataclasses

import numpy as np

from manifoldmuon._internal.arguments import check_fields, check_number, shown
from manifoldmuon._internal.values import Value
from manifoldmuon.linalg._polynomials import factor_products

Coefficients = tuple[float, ...]


class Schedule(Value, abc.ABC):
    """Odd polynomials, applied in turn, as a frozen, hashable value.

    A step `(a, b, c)` acts on every singular value in [0, 1] as `a s + b s^3 + c s^5`; a step
    of two numbers has degree 3, of four 7, of k numbers degree 2k - 1.
    """

    @property
    @abc.abstractmethod
    def coefficients(self) -> tuple[Coefficients, ...]:
        """Return the steps in order; not empty."""

    @abc.abstractmethod
    def with_steps(self, steps: int) -> "Schedule":
        """Return the same schedule with this number of steps."""

    @property
    def length(self) -> int:
        """Return the number of steps."""
        return len(self.coefficients)

    @property
    def products(self) -> int:
        """Return the number of matrix products in the direct form, for square matrices."""
        return sum(2 + factor_products(len(step)) for step in self.coefficients)

    def apply(self, values) -> np.ndarray:
        """Apply the schedule to singular values, in float64, for plots and tests."""
        x = np.asarray(values, np.float64)
        for step in self.coefficients:
            x = x * np.polynomial.polynomial.polyval(x * x, step)
        return np.asarray(x)

    @classmethod
    def check(cls, name: str, schedule: object) -> None:
        """Raise `TypeError`, naming the argument, unless it is a `Schedule`."""
        if not isinstance(schedule, cls):
            got = f"got {schedule!r}"
            raise TypeError(f"{name} must be a Schedule such as PolarExpress(1e-3); {got}")


@dataclasses.dataclass(frozen=True)
class FixedSchedule(Schedule):
    """A schedule with explicit coefficients.

    Attributes:
      head: the first steps, in order.
      tail: the step to repeat after `head`; None: no further steps.
      steps: number of steps; None: the length of `head`.

    Examples:
      >>> newton_schulz = FixedSchedule(((1.5, -0.5),) * 5)
      >>> msign(jnp.eye(2), NewtonSchulz(newton_schulz)).shape
      (2, 2)
    """

    head: tuple[Coefficients, ...] = ()
    tail: Coefficients | None = None
    steps: int | None = None

    def __post_init__(self):
        check_fields(self, steps="[1, inf)")
        if not isinstance(self.head, tuple):
            raise TypeError(f"FixedSchedule.head must be a tuple of steps; got {shown(self.head)}")
        for step in self.head if self.tail is None else (*self.head, self.tail):
            if not isinstance(step, tuple) or len(step) < 2:
                raise ValueError(
                    f"a step is a tuple of two coefficients (degree 3) or more; got {shown(step)}"
                )
            for coefficient in step:
                check_number("a coefficient of FixedSchedule", coefficient)
        count = len(self.head) if self.steps is None else self.steps
        if count < 1:
            raise ValueError(
                f"a schedule needs steps; got steps={self.steps!r} and a head of {len(self.head)}"
            )
        if self.tail is None and count > len(self.head):
            raise ValueError(
                f"steps={self.steps} exceeds the {len(self.head)} polynomials of a schedule "
                "without tail; ask for fewer steps or give it a tail"
            )

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        count = len(self.head) if self.steps is None else self.steps
        tail = () if self.tail is None else (self.tail,) * count
        return (self.head + tail)[:count]

    def with_steps(self, steps: int) -> "FixedSchedule":
        return dataclasses.replace(self, steps=steps)


def _over_1024(*steps: tuple[int, int, int]) -> tuple[Coefficients, ...]:
    return tuple((a / 1024, b / 1024, c / 1024) for a, b, c in steps)


def _divided_argument(by: float, *steps: Coefficients) -> tuple[Coefficients, ...]:
    """Return the coefficients of `f(x / by)`."""
    return tuple(tuple(c / by ** (2 * k + 1) for k, c in enumerate(step)) for step in steps)


CUBIC = FixedSchedule(tail=(1.5, -0.5), steps=30)
"""The classical Newton-Schulz iteration (Higham, Functions of Matrices, 2008, eq. 8.20).

The cubic has value 1 and slope 0 at 1: quadratic convergence there. Small singular values grow by a
factor of 3/2 per step.
"""

QUINTIC = FixedSchedule(tail=(3.0, -16 / 5, 6 / 5), steps=15)
"""The quintic of the Modula library (docs.modula.systems).

f(1) = 1 with slope -3/5, so it converges linearly in the end.
"""

MUON = FixedSchedule(tail=(3.4445, -4.7750, 2.0315), steps=5)
"""Muon's quintic (Jordan 2024).

As steep at 0 as possible with values that stay within about [0.7, 1.2]. It does not converge:
f(1) = 0.701.
"""

MODULA_SIX_STEP = FixedSchedule(
    head=_over_1024(
        (3955, -8306, 5008),
        (3735, -6681, 3463),
        (3799, -6499, 3211),
        (4019, -6385, 2906),
        (2677, -3029, 1162),
        (2172, -1833, 682),
    )
)
"""Six steps with a quintic each, found by numerical optimisation (the Modula library).

The published numbers are integer multiples of 1/1024.
"""

POLAR_EXPRESS = FixedSchedule(
    head=_divided_argument(
        1.01,
        (8.28721, -23.59589, 17.30039),
        (4.10706, -2.94785, 0.54484),
        (3.94869, -2.90890, 0.55182),
        (3.31842, -2.48849, 0.51005),
        (2.30065, -1.66890, 0.41881),
        (1.89130, -1.26800, 0.37681),
    ),
    tail=(1.875, -1.25, 0.375),
    steps=8,
)
"""Polar Express as published (arXiv:2505.16932): minimax for singular values in [1e-3, 1].

The argument of each step is divided by 1.01, or a value that bfloat16 rounds above 1 would escape;
the Taylor step at the end does not need this. `PolarExpress` designs such schedules for any range.
"""
