"""What is known of one weight: its manifold alone, or its value too."""

import dataclasses
from typing import Any

import numpy as np

from manifoldmuon.certificates._reach import reach
from manifoldmuon.modules import Leaf

ROUNDING = 1e-10
"""Relative to the largest: more than LAPACK's singular values in float64 may be wrong by."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """One weight of an architecture, or its copies in a stack; a leaf of trees.

    Attributes:
      leaf: its manifold and its budget.
      value: its value in float64; None where it may be anywhere on its manifold.
      radius: how far it may move from its value, in the modular norm.
      drift: how far it may be from its manifold, relative to the manifold's scale.
    """

    leaf: Leaf
    value: np.ndarray | None
    radius: float
    drift: float

    def copy(self, index: int) -> "Weight":
        """One copy of a stack."""
        leaf = dataclasses.replace(self.leaf, budget=np.asarray(self.leaf.budget[index]))
        value = None if self.value is None else self.value[index]
        return dataclasses.replace(self, leaf=leaf, value=value)

    def stretch(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """Of its matrices: the sum of their spectral norms, and the smallest singular value."""
        taps = int(np.prod(shape[:-2]))
        if self.value is None:
            known = reach(self.leaf.manifold, shape)
            return self._drifted(taps * known.stretch, known.least_stretch)
        values = np.linalg.svd(self.value, compute_uv=False)
        step = self.radius * self.step_stretch(shape)
        return _rounded(values[..., 0].sum() + step, values[..., -1].min() - step)

    def rows(self, shape: tuple[int, ...]) -> tuple[float, float]:
        """The length of the longest row and of the shortest."""
        if self.value is None:
            known = reach(self.leaf.manifold, shape)
            return self._drifted(known.row, known.least_row)
        lengths = np.linalg.norm(self.value, axis=-1)
        step = self.radius * self.step_rows(shape)
        return _rounded(lengths.max() + step, lengths.min() - step)

    def step_stretch(self, shape: tuple[int, ...]) -> float:
        """The sum of its matrices' spectral norms, of a step of modular norm 1."""
        budget = float(self.leaf.budget)
        taps = int(np.prod(shape[:-2]))
        return taps * budget * reach(self.leaf.manifold, shape).stretch if budget else 0.0

    def step_rows(self, shape: tuple[int, ...]) -> float:
        """The length of the longest row of such a step."""
        budget = float(self.leaf.budget)
        return budget * reach(self.leaf.manifold, shape).row if budget else 0.0

    def _drifted(self, most: float, least: float) -> tuple[float, float]:
        return most * (1 + self.drift), max(least * (1 - self.drift), 0.0)


def weight_of(leaf: Leaf, value: Any, radius: float, drift: float) -> Weight:
    """A weight with its value, or on its manifold if that is None.

    Raises:
      ValueError: the value is not finite.
    """
    if value is None:
        return Weight(leaf, None, radius, drift)
    array = np.asarray(value).astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"a weight on {type(leaf.manifold).__name__} is not finite")
    return Weight(leaf, array, radius, drift)


def _rounded(most: float, least: float) -> tuple[float, float]:
    slack = ROUNDING * most
    return float(most + slack), float(max(least - slack, 0.0))
