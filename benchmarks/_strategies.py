"""Random cases as strategies of Hypothesis.

Each is a few numbers, from which Hypothesis shrinks to the simplest case that fails; arrays are
drawn from the seed among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from benchmarks._gradients import GRADIENT_FAMILIES


class Case(NamedTuple):
    """A stack of gradients on a manifold, most of them almost normal to it.

    Attributes:
      manifold: a name.
      shape: of the stack, with one leading axis or more.
      dtype: of the arrays.
      scale: the power of two by which the gradient is multiplied, within what float16 holds.
      share: the power of two of the free part beside a normal part of 1; 0: no normal part.
      decay: decades over which the columns of the free part fall.
      kind: `"normal"`, `"inward"` (the negative of a normal part), `"low rank"` (of the free
        part), `"zero"`, `"NaN"` or `"infinite"`.
      seed: of all that is random.
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
        largest = np.abs(part).max() or 1.0  # nothing is normal inside of a set
        grad = part / largest * (self.share < 0) + 2.0**self.share * free
        # float16 holds numbers from 2**-24 to 2**16.
        return grad * 2.0 ** (
            np.clip(self.scale, -4, 10) if self.dtype == "float16" else self.scale
        )


def cases(
    manifolds: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> st.SearchStrategy[Case]:
    """Return a strategy of cases; fewer of each argument compile fewer programs.

    Args:
      manifolds: names, which the test maps to manifolds.
      shapes: of stacks, with one leading axis or more.
      dtypes: names.
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
    """Return a strategy of powers of two for the gradients of a short training; None is a NaN.

    Args:
      steps: the longest training.
    """
    return st.lists(st.one_of(st.none(), st.integers(-140, 60)), min_size=1, max_size=steps)


def sequences() -> st.SearchStrategy[tuple[str, int, int]]:
    """Return a strategy of family, period and seed for `gradient_sequence`."""
    return st.tuples(
        st.sampled_from(GRADIENT_FAMILIES), st.sampled_from((1, 5, 50)), st.integers(0, 2**31)
    )
