"""In which norm a value is bounded, and how norms bound each other."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

from manifoldmuon._internal.arguments import check_fields


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
class L2(Measure):
    """The Euclidean length over the last axes: of a vector, an image, or all tokens together.

    What certified robustness is measured in. Layers that mix pixels are as steep as they are
    orthogonal in it, where the largest RMS norm of a pixel knows only how many they mix.

    Attributes:
      axes: how many; 1 for vectors `(..., d)`, 3 for images `(..., height, width, channels)`.
    """

    axes: int = 1

    def __post_init__(self):
        check_fields(self, axes="[1, inf)")

    def __str__(self) -> str:
        return "length" if self.axes == 1 else f"length over {self.axes} axes"


@dataclasses.dataclass(frozen=True)
class Heads(Measure):
    """Of `(..., heads, sequence, dim)`: a token's root mean square over its heads and entries.

    Attributes:
      count: how many heads. The RMS norm of one of them is at most `sqrt(count)` times as large.
    """

    count: int

    def __post_init__(self):
        check_fields(self, count="[1, inf)")

    def __str__(self) -> str:
        return f"RMS over {self.count} heads"


@dataclasses.dataclass(frozen=True)
class LInf(Measure):
    """The largest magnitude of an entry."""

    def __str__(self) -> str:
        return "largest"


@dataclasses.dataclass(frozen=True)
class MaskedLInf(Measure):
    """The largest magnitude of a score that is not masked; the masked ones are minus infinity."""

    def __str__(self) -> str:
        return "largest kept"


@dataclasses.dataclass(frozen=True)
class L1(Measure):
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
class NormBound:
    """How large a value may be.

    Attributes:
      upper: no token, pixel or example is larger; may be infinite.
      lower: none is smaller. Only division by the norm gains from knowing it.
      measure: in which norm.
      features: the length of the last axis; None where it is not known.
    """

    upper: float
    lower: float = 0.0
    measure: Measure = RMS()
    features: int | None = None

    def __post_init__(self):
        check_fields(self, features="[1, inf)")
        if not 0 <= self.lower <= self.upper:
            raise ValueError(
                f"a NormBound needs 0 <= lower <= upper; got {self.lower}, {self.upper}"
            )

    def scaled(self, factor: float, features: int | None = None) -> "NormBound":
        """The size of what is exactly `factor` times as large."""
        return dataclasses.replace(
            self,
            upper=times(factor, self.upper),
            lower=times(factor, self.lower),
            features=self.features if features is None else features,
        )

    def within(self, factor: float = 1.0, **changes: Any) -> "NormBound":
        """The size of what is at most `factor` times as large."""
        return dataclasses.replace(self, upper=times(factor, self.upper), lower=0.0, **changes)

    def is_length(self, axes: int) -> bool:
        """Return whether this is the length over this many axes, or more."""
        return isinstance(self.measure, L2) and self.measure.axes >= axes

    def __str__(self) -> str:
        low = f"{self.lower:.4g} … " if self.lower and self.lower != self.upper else ""
        return f"{low}{self.upper:.4g}"


def times(a: float, b: float) -> float:
    """The product, with 0 times infinity being 0: what does not move has no effect."""
    return 0.0 if a == 0 or b == 0 else float(a * b)


def factor_between(size: NormBound, target: Measure) -> float:
    """A number c with `||v||_target <= c ||v||_measure` for all values like this one.

    Raises:
      ValueError: there is none, or it depends on a length that is not known.
    """
    source = size.measure
    if source == target:
        return 1.0
    if isinstance(source, MaskedLInf | OneHot) or isinstance(target, MaskedLInf | OneHot):
        raise ValueError(f"a value measured as '{source}' cannot be read as '{target}'")
    if isinstance(target, L2):
        return _into_length(size, source, target)
    if isinstance(source, L2):
        if isinstance(target, L1):
            return _root_of_features(size, target)
        # A length is at least the magnitude of every entry.
        known = size.features if target == RMS() else None
        return 1.0 if known is None else 1 / math.sqrt(known)
    if isinstance(source, Heads):
        per_head = dataclasses.replace(size, measure=RMS())
        return math.sqrt(source.count) * factor_between(per_head, target)
    if isinstance(target, RMS | Heads):  # of entries of magnitude 1 the RMS norm is 1
        return 1.0
    if isinstance(source, L1):
        return 1.0
    root = _root_of_features(size, target)
    return root if isinstance(target, LInf) else root**2


def _into_length(size: NormBound, source: Measure, target: L2) -> float:
    """Lengths over fewer axes are no larger; over more of them, their number would be needed."""
    axes = source.axes if isinstance(source, L2) else 1
    if target.axes > axes or isinstance(source, Heads):
        raise ValueError(
            f"from the norm '{source}' to '{target}' takes the lengths of axes that are not known "
            f"here: declare the input as NormBound(..., measure={target!r})"
        )
    return _root_of_features(size, target) if isinstance(source, RMS | LInf) else 1.0


def _root_of_features(size: NormBound, target: Measure) -> float:
    if size.features is None:
        raise ValueError(
            f"from the norm '{size.measure}' to '{target}' takes the length of the last axis, "
            "which is not known here: declare the input as NormBound(..., features=...)"
        )
    return math.sqrt(size.features)


def expect_features(size: NormBound, features: int | None = None, divisor: int = 1) -> None:
    """Raise `ValueError` where the last axis is known to have another length, or to leave a rest.

    Args:
      size: of the input.
      features: the length that is needed; None for any.
      divisor: what has to divide it.
    """
    known = size.features
    if known is not None and features not in (None, known):
        raise ValueError(f"expected {features} entries in the last axis; got {known}")
    if known is not None and known % divisor:
        raise ValueError(f"{divisor} does not divide the {known} entries of the last axis")
