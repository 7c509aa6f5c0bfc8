"""In which norm a value is bounded, and how norms bound each other."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any


class Measure(abc.ABC):
    """A norm of arrays, as a frozen value: over the last axes, and the largest over all others."""

    @abc.abstractmethod
    def __str__(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class RMS(Measure):
    """The root mean square over the last axis: the largest among tokens, pixels and examples."""

    def __str__(self) -> str:
        return "RMS"


@dataclasses.dataclass(frozen=True)
class Heads(Measure):
    """Of `(..., heads, sequence, dim)`: a token's root mean square over its heads and entries.

    Attributes:
      count: how many heads. The RMS norm of one of them is at most `sqrt(count)` times as large.
    """

    count: int

    def __str__(self) -> str:
        return f"RMS over {self.count} heads"


@dataclasses.dataclass(frozen=True)
class Largest(Measure):
    """The largest magnitude of an entry."""

    def __str__(self) -> str:
        return "largest"


@dataclasses.dataclass(frozen=True)
class Kept(Measure):
    """The largest magnitude of a score that is not masked; the masked ones are minus infinity."""

    def __str__(self) -> str:
        return "largest kept"


@dataclasses.dataclass(frozen=True)
class Total(Measure):
    """The sum of magnitudes over the last axis, as of probabilities."""

    def __str__(self) -> str:
        return "sum"


@dataclasses.dataclass(frozen=True)
class OneHot(Measure):
    """Of whole numbers: the sum of magnitudes of a token's one-hot vector.

    A token has norm 1, and to exchange it for another is a step of norm 2.
    """

    def __str__(self) -> str:
        return "one-hot"


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a value may be.

    Attributes:
      most: no token, pixel or example is larger; may be infinite.
      least: none is smaller. Only division by the norm gains from knowing it.
      measure: in which norm.
      features: the length of the last axis; None where it is not known.
    """

    most: float
    least: float = 0.0
    measure: Measure = RMS()
    features: int | None = None

    def __post_init__(self):
        if not 0 <= self.least <= self.most:
            raise ValueError(f"a Size needs 0 <= least <= most; got {self.least}, {self.most}")

    def scaled(self, factor: float, features: int | None = None) -> "Size":
        """The size of what is exactly `factor` times as large."""
        return dataclasses.replace(
            self,
            most=times(factor, self.most),
            least=times(factor, self.least),
            features=self.features if features is None else features,
        )

    def within(self, factor: float = 1.0, **changes: Any) -> "Size":
        """The size of what is at most `factor` times as large."""
        return dataclasses.replace(self, most=times(factor, self.most), least=0.0, **changes)

    def __str__(self) -> str:
        low = f"{self.least:.4g} … " if self.least and self.least != self.most else ""
        return f"{low}{self.most:.4g}"


def times(a: float, b: float) -> float:
    """The product, with 0 times infinity being 0: what does not move has no effect."""
    return 0.0 if a == 0 or b == 0 else float(a * b)


def factor_between(size: Size, target: Measure) -> float:
    """A number c with `||v||_target <= c ||v||_measure` for all values like this one.

    Raises:
      ValueError: there is none, or it depends on a length that is not known.
    """
    source = size.measure
    if source == target:
        return 1.0
    if isinstance(source, Kept | OneHot) or isinstance(target, Kept | OneHot):
        raise ValueError(f"a value measured as '{source}' cannot be read as '{target}'")
    if isinstance(source, Heads):
        per_head = dataclasses.replace(size, measure=RMS())
        return math.sqrt(source.count) * factor_between(per_head, target)
    if isinstance(target, RMS | Heads):  # of entries of magnitude 1 the RMS norm is 1
        return 1.0
    if isinstance(source, Total):
        return 1.0
    if size.features is None:
        raise ValueError(
            f"from the norm '{source}' to '{target}' takes the length of the last axis, which is "
            "not known here: declare the input as Size(..., features=...)"
        )
    if isinstance(target, Largest):
        return math.sqrt(size.features)
    return float(size.features)
