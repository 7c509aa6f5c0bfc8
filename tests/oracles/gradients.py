"""Gradient sequences that defeat warm starts."""

from __future__ import annotations

import numpy as np

GRADIENT_FAMILIES = ("sparse", "entry", "row", "rank 1", "blocks", "rotated blocks", "scales")
"""Sequence families known to `gradient_sequence`."""


def gradient_sequence(
    family: str, shape: tuple[int, int], steps: int, period: int = 50, seed: int = 0
) -> np.ndarray:
    """Draw sparse or switching gradients, which are hard for warm-started solvers.

    * `"sparse"`: new Gaussian entries in each step; 5 % of the entries (at least one) are not zero.
    * `"entry"`, `"row"`, `"rank 1"`: a fixed entry, row or outer product, redrawn every `period`
      steps.
    * `"blocks"`: new Gaussian entries in one of two diagonal blocks, which alternate every `period`
      steps. `"rotated blocks"`: the same multiplied by random orthogonal matrices on both sides, so
      that no entry is zero.
    * `"scales"`: new Gaussian entries, scaled by a power of ten from -6 to 6 that is redrawn every
      `period` steps.

    Args:
      family: member of `GRADIENT_FAMILIES`.
      shape: shape of each gradient.
      steps: number of gradients.
      period: steps between switches.
      seed: random seed.

    Returns:
      Shape `(steps, *shape)`, float64.

    """
    rng, (m, n) = np.random.default_rng(seed), shape
    part = np.arange(steps) // period  # index of each step's period
    fresh = rng.standard_normal((steps, m, n))
    left, right = rng.standard_normal((steps, m, 1)), rng.standard_normal((steps, 1, n))
    rows, columns = np.arange(m)[:, None], np.arange(n)
    row = rng.integers(m, size=steps)[part, None, None]
    column = rng.integers(n, size=steps)[part, None, None]
    if family == "sparse":
        kept = rng.random((steps, m * n)).argsort(-1).argsort(-1) < max(m * n // 20, 1)
        return fresh * kept.reshape(fresh.shape)
    if family == "entry":
        return ((rows == row) & (columns == column)) * left[part, :1]
    if family == "row":
        return (rows == row) * right[part]
    if family == "rank 1":
        return left[part] * right[part]
    if family == "scales":
        return fresh * 10.0 ** rng.integers(-6, 7, size=steps)[part, None, None]
    first = (part % 2 == 0)[:, None, None]
    grads = fresh * ((rows < (m + 1) // 2) == first) * ((columns < (n + 1) // 2) == first)
    if family == "blocks":
        return grads
    assert family == "rotated blocks", family
    turns = [np.linalg.qr(rng.standard_normal((k, k)))[0] for k in shape]
    return turns[0] @ grads @ turns[1]
