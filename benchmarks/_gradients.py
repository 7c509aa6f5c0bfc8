"""Sequences of gradients that break what is carried from step to step."""

from __future__ import annotations

import numpy as np

GRADIENT_FAMILIES = ("sparse", "entry", "row", "rank 1", "blocks", "rotated blocks", "scales")
"""The families of sequences that `gradient_sequence` knows."""


def gradient_sequence(
    family: str, shape: tuple[int, int], steps: int, period: int = 50, seed: int = 0
) -> np.ndarray:
    """Draw gradients that are sparse or that switch: hard for what is warm-started.

    * `"sparse"`: new Gaussian entries in each step, one in twenty (at least one) not zero.
    * `"entry"`, `"row"`, `"rank 1"`: one entry, row or outer product, another one every `period`
      steps.
    * `"blocks"`: new Gaussian entries in one diagonal block of two; every `period` steps the other
      one. `"rotated blocks"`: the same between two random orthogonal matrices, so that no entry is
      zero.
    * `"scales"`: new Gaussian entries; every `period` steps another power of ten from -6 to 6.

    Args:
      family: one of `GRADIENT_FAMILIES`.
      shape: of one gradient.
      steps: how many.
      period: steps from one switch to the next.
      seed: of the random numbers.

    Returns:
      Shape `(steps, *shape)`, float64.

    Raises:
      ValueError: `family` is not in `GRADIENT_FAMILIES`.
    """
    if family not in GRADIENT_FAMILIES:
        raise ValueError(f"family must be one of {GRADIENT_FAMILIES}; got {family!r}")
    rng, (m, n) = np.random.default_rng(seed), shape
    part = np.arange(steps) // period  # which part of the sequence a step belongs to
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
    turns = [np.linalg.qr(rng.standard_normal((k, k)))[0] for k in shape]
    return turns[0] @ grads @ turns[1]
