"""Scales of a manifold: plain numbers, or rules that compute a number from the point's shape."""

import abc
import dataclasses
import math


class ScaleRule(abc.ABC):
    """A scale that depends on the shape of the point, as a frozen, hashable value."""

    @abc.abstractmethod
    def of(self, shape: tuple[int, ...]) -> float:
        """The scale of one point of this shape (without leading axes)."""


@dataclasses.dataclass(frozen=True)
class FanRatio(ScaleRule):
    """`gain * sqrt(fan_out / fan_in)` for a `(fan_out, fan_in)` matrix.

    A matrix whose singular values all have this size maps inputs with entries of size about 1
    to outputs with entries of size about `gain`, at every width: unit RMS-to-RMS norm.

    Attributes:
      gain: a positive factor.
    """

    gain: float = 1.0

    def of(self, shape: tuple[int, ...]) -> float:
        fan_out, fan_in = shape[-2:]
        return self.gain * math.sqrt(fan_out / fan_in) if fan_out and fan_in else self.gain


@dataclasses.dataclass(frozen=True)
class RootDim(ScaleRule):
    """`gain * sqrt(d)` for a vector of `d` entries: a root-mean-square norm of `gain`.

    Attributes:
      gain: a positive factor.
    """

    gain: float = 1.0

    def of(self, shape: tuple[int, ...]) -> float:
        return self.gain * math.sqrt(max(math.prod(shape), 1))


def scale_of(scale: float | ScaleRule, shape: tuple[int, ...]) -> float:
    """The number that `scale` stands for at a point of this shape."""
    return scale.of(shape) if isinstance(scale, ScaleRule) else float(scale)


def check_scale(name: str, scale: float | ScaleRule) -> None:
    """Raises `ValueError` unless `scale` is a rule or a positive, finite number."""
    number = getattr(scale, "gain", 1.0) if isinstance(scale, ScaleRule) else scale
    if not (isinstance(number, (int, float)) and math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive, finite number or a ScaleRule; got {scale!r}")
