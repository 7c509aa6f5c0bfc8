"""Scales of norms and manifolds: a number, or a rule for the shape of a weight."""

from __future__ import annotations

import abc

from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.values import Value


class ScaleRule(Value, abc.ABC):
    """A scale that depends on the shape of a weight, as a frozen, hashable value."""

    @abc.abstractmethod
    def of(self, shape: tuple[int, ...]) -> float:
        """Return the scale of a weight of this shape (without leading axes)."""


def scale_of(scale: float | ScaleRule, shape: tuple[int, ...]) -> float:
    """Return the scale of a weight of this shape, as a number."""
    return scale.of(shape) if isinstance(scale, ScaleRule) else float(scale)


def check_scale(name: str, scale: float | ScaleRule) -> None:
    """Raise `ValueError` unless `scale` is a rule or a finite, positive number."""
    if not isinstance(scale, ScaleRule):
        check_number(name, scale, within="(0, inf)", others=" or a ScaleRule")
