"""Scales of norms and manifolds: a number, or a rule for the shape of a weight."""

from __future__ import annotations

import abc
import math

import jax
import numpy as np

from manifoldmuon._internal.arguments import shown
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
    """Raise `ValueError` unless `scale` is a rule or a positive, finite number."""
    number = isinstance(scale, int | float | np.integer | np.floating)
    positive = number and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0
    if not (positive or isinstance(scale, ScaleRule)):
        hint = (
            ". It is static: give a Python number, under optax.inject_hyperparams by `static_args`"
        )
        raise ValueError(
            f"{name} must be a positive, finite number or a ScaleRule; got {shown(scale)}"
            + (hint if isinstance(scale, jax.Array) else "")
        )
