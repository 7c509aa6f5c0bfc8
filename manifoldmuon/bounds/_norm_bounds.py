"""Norms of the values inside a network, and bounds on these norms."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from manifoldmuon._internal.arguments import check_fields, number


class ActivationNorm:
    """Base class of norms, as frozen values: over the last axes, then the maximum over the rest."""


@dataclasses.dataclass(frozen=True)
class RMS(ActivationNorm):
    """The root mean square over the last axis, maximal over tokens, pixels and examples.

    Attributes:
      heads: number of heads. Above 1, arrays are `(..., heads, sequence, dim)`, and the mean is
        over all heads and entries of a token. The RMS norm of a single head is at most
        `sqrt(heads)` times as large.
    """

    heads: int = 1

    def __post_init__(self):
        check_fields(self, heads="[1, inf)")


@dataclasses.dataclass(frozen=True)
class L2(ActivationNorm):
    """The Euclidean length over the last axes: a vector's, an image's, or all tokens' together.

    The norm of certified robustness. An orthogonal layer that mixes pixels has slope 1 in it; in
    the largest RMS norm of a pixel, its slope may grow with the number of mixed pixels.

    Attributes:
      axes: number of axes; 1 for vectors `(..., d)`, 3 for images `(..., height, width, channels)`.

    Examples:
      >>> bound(mm.modules.ReLU(), input_norm=NormBound(1.0, norm=L2(3))).output_norm
      1.0
    """

    axes: int = 1

    def __post_init__(self):
        check_fields(self, axes="[1, inf)")


@dataclasses.dataclass(frozen=True)
class LInf(ActivationNorm):
    """The largest magnitude of an entry."""


@dataclasses.dataclass(frozen=True)
class OneHot(ActivationNorm):
    """The l1 norm of tokens, whole numbers, as one-hot vectors.

    A token has norm 1, and a change of token is a step of norm 2.
    """


@dataclasses.dataclass(frozen=True)
class NormBound:
    """Bounds on the norm of a value.

    Attributes:
      upper: the largest norm of a token, pixel or example; may be infinite.
      lower: the smallest. Only division by the norm (`RMSDivide`) needs it.
      norm: `RMS()`, `L2(axes)`, `LInf()` or `OneHot()`.
      features: the length of the last axis; None if unknown.
    """

    upper: float
    lower: float = 0.0
    norm: ActivationNorm = RMS()
    features: int | None = None

    def __post_init__(self):
        check_fields(self, features="[1, inf)")
        number("[0, inf)")("NormBound.upper", 0 if self.upper == math.inf else self.upper)
        if not 0 <= self.lower <= self.upper:
            raise ValueError(
                f"NormBound: 0 <= lower <= upper must hold; got {self.lower}, {self.upper}"
            )

    def scaled(self, factor: float, **changes: Any) -> "NormBound":
        """Return bounds for exactly `factor` times the norm; `changes` replace other fields."""
        lower = times_down(factor, self.lower)
        return dataclasses.replace(self.within(factor, **changes), lower=lower)

    def within(self, factor: float = 1.0, **changes: Any) -> "NormBound":
        """Return bounds for at most `factor` times the norm; `changes` replace other fields."""
        return dataclasses.replace(self, upper=times(factor, self.upper), lower=0.0, **changes)

    def is_length(self, axes: int) -> bool:
        """Check whether the norm is `L2` over at least this many axes."""
        return isinstance(self.norm, L2) and self.norm.axes >= axes

    def expect_features(self, features: int | None = None, divisor: int = 1) -> None:
        """Raise `ValueError` unless the last axis may have this length and this divisor."""
        known = self.features
        if known is not None and features not in (None, known):
            raise ValueError(f"expected {features} entries in the last axis; got {known}")
        if known is not None and known % divisor:
            raise ValueError(f"{divisor} does not divide the {known} entries of the last axis")

    def expect_numbers(self) -> None:
        """Raise `ValueError` for tokens, which allow no arithmetic."""
        if self.norm == OneHot():
            raise ValueError(
                f"this module takes arrays of numbers; got an input in the norm {self.norm}"
            )

    def __str__(self) -> str:
        low = f"{self.lower:.4g} … " if self.lower and self.lower != self.upper else ""
        return f"{low}{self.upper:.4g}"


LEAST = sys.float_info.min
"""The smallest product of nonzero upper bounds."""


def times(a: float, b: float) -> float:
    """Multiply upper bounds; 0 times infinity is 0.

    Other products are at least `LEAST`: a bound that underflowed to 0 would claim no movement.
    """
    return 0.0 if a == 0 or b == 0 else max(float(a * b), LEAST)


def times_down(a: float, b: float) -> float:
    """Multiply lower bounds; the product may underflow to 0 and is always finite."""
    return 0.0 if a == 0 or b == 0 else min(float(a * b), sys.float_info.max)


def factor_between(size: NormBound, target: ActivationNorm) -> float:
    """Return a number c with `||v||_target <= c ||v||_source` for all values of this size."""
    source = size.norm
    if source == target:
        return 1.0
    if OneHot() in (source, target):
        raise ValueError(f"an input in the norm {source} cannot be converted to {target}")
    if isinstance(target, L2):
        # A length over fewer axes is no larger; for more axes, their sizes would be needed.
        axes = source.axes if isinstance(source, L2) else 1
        if target.axes > axes or (isinstance(source, RMS) and source.heads > 1):
            raise ValueError(
                f"converting {source} to {target} needs the lengths of the axes: declare the input "
                f"as NormBound(..., norm={target!r})"
            )
        return _root_of_features(size, target) if isinstance(source, RMS | LInf) else 1.0
    if isinstance(source, L2):
        # A length is at least the magnitude of every entry.
        known = size.features if target == RMS() else None
        return 1.0 if known is None else 1 / math.sqrt(known)
    if isinstance(source, RMS) and source.heads > 1:
        per_head = dataclasses.replace(size, norm=RMS())
        return math.sqrt(source.heads) * factor_between(per_head, target)
    # RMS is at most the largest magnitude.
    return 1.0 if isinstance(target, RMS) else _root_of_features(size, target)


def _root_of_features(size: NormBound, target: ActivationNorm) -> float:
    if size.features is None:
        raise ValueError(
            f"converting {size.norm} to {target} needs the length of the last axis: declare the "
            "input as NormBound(..., features=...)"
        )
    return math.sqrt(size.features)
