"""Hypothesis strategies for random test cases.

A case is a few numbers, which Hypothesis can shrink to the simplest failure; a seed among them
draws the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from benchmarks._gradients import GRADIENT_FAMILIES


class Case(NamedTuple):
    """Stack of gradients on a manifold, most of them almost normal to it.

    Attributes:
      manifold: name of the manifold.
      shape: shape of the stack, including its leading axes (at least 1).
      dtype: dtype of the arrays.
      scale: power of two that multiplies the gradient, clipped to float16's range for float16.
      share: power of two that multiplies the free part, next to a normal part of largest entry 1;
        0: no normal part.
      decay: decades over which the columns of the free part fall.
      kind: `"normal"`, `"inward"` (negated normal part), `"low rank"` (free part of rank 1),
        `"zero"`, `"NaN"` or `"infinite"`.
      seed: seed of every random array.
    """

    manifold: str
    shape: tuple[int, ...]
    dtype: str
    scale: int
    share: int
    decay: float
    kind: str
    seed: int

    def gradient(
        self, rng: np.random.Generator, normal: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Draw the gradient in float64; `normal` projects arrays of `shape` onto normal spaces."""
        *batch, m, n = self.shape
        if self.kind in ("zero", "NaN", "infinite"):
            grad = np.zeros(self.shape)
            grad[..., 0, 0] = {"zero": 0, "NaN": np.nan, "infinite": np.inf}[self.kind]
            return grad
        free = rng.standard_normal(self.shape) * np.logspace(0, -self.decay, n)
        if self.kind == "low rank":
            free = rng.standard_normal((*batch, m, 1)) @ rng.standard_normal((*batch, 1, n))
        part = normal(rng.standard_normal(self.shape))
        part = -part if self.kind == "inward" else part
        largest = np.abs(part).max() or 1.0  # the interior of a set has no normal directions
        grad = part / largest * (self.share < 0) + 2.0**self.share * free
        # float16 holds numbers from 2**-24 to 2**16.
        return grad * 2.0 ** (
            np.clip(self.scale, -4, 10) if self.dtype == "float16" else self.scale
        )


def cases(
    manifolds: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> st.SearchStrategy[Case]:
    """Return a strategy for cases; shorter arguments compile fewer programs.

    Args:
      manifolds: names, mapped to manifolds by the test.
      shapes: shapes of stacks, including their leading axes (at least 1).
      dtypes: names of dtypes.
    """
    kinds = ("normal", "normal", "inward", "inward", "low rank", "zero", "NaN", "infinite")
    return st.builds(
        Case,
        manifold=st.sampled_from(manifolds),
        shape=st.sampled_from(shapes),
        dtype=st.sampled_from(dtypes),
        scale=st.integers(-140, 120),
        share=st.integers(-24, 0),
        decay=st.floats(0, 6),
        kind=st.sampled_from(kinds),
        seed=st.integers(0, 2**31),
    )


def gradient_scales(steps: int = 6) -> st.SearchStrategy[list[int | None]]:
    """Return a strategy for gradient scales of a short training: powers of two, or None for NaN.

    Args:
      steps: length of the longest training.
    """
    return st.lists(st.one_of(st.none(), st.integers(-140, 60)), min_size=1, max_size=steps)


def sequences() -> st.SearchStrategy[tuple[str, int, int]]:
    """Return a strategy for the family, period and seed of `gradient_sequence`."""
    return st.tuples(
        st.sampled_from(GRADIENT_FAMILIES), st.sampled_from((1, 5, 50)), st.integers(0, 2**31)
    )
