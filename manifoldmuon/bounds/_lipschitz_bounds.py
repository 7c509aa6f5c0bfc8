"""Composable bounds on a module's output and on its response to perturbations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from manifoldmuon.bounds._norm_bounds import LEAST, RMS, ActivationNorm, NormBound, factor_between

Sizes = Any
"""A `NormBound` (a leaf of trees) for an array, or a tuple of `Sizes` for several arrays."""


@dataclasses.dataclass(frozen=True, eq=False)
class LipschitzBounds:
    """Bounds on a module's output and on its derivative, for inputs of given sizes.

    Index i numbers the input arrays, o the output arrays, in the order of their tuples.
    Perturbations of an array are measured in the array's norm, perturbations of the weights in
    the modular norm of the whole network.

    Attributes:
      outputs: bounds on the output: a `NormBound` or a tuple of them.
      slopes: `(o, i)`, how much output o moves per movement of input i.
      weights: `(o,)`, how much output o moves per movement of the weights.
      reasons: causes of infinite bounds.
      parts: the bounds of the module's parts.

    Examples:
      >>> doubled = LipschitzBounds.of(NormBound(2.0), 2.0)
      >>> doubled.then(LipschitzBounds.of(NormBound(6.0), 3.0)).slopes
      array([[6.]])
    """

    outputs: Sizes
    slopes: np.ndarray
    weights: np.ndarray
    reasons: tuple[str, ...] = ()
    parts: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        outputs: NormBound,
        slopes: float | Sequence[float],
        *,
        weights: float = 0.0,
        reasons: tuple[str, ...] = (),
    ) -> "LipschitzBounds":
        """Return the bounds of a module with one output array; `slopes` has one for each input."""
        row = np.atleast_1d(np.asarray(slopes, float))
        return cls(outputs, row[None], np.array([weights], float), reasons)

    @classmethod
    def identity(cls, x: Sizes) -> "LipschitzBounds":
        """Return the bounds of the identity map."""
        count = len(jax.tree.leaves(x))
        return cls(x, np.eye(count), np.zeros(count))

    @classmethod
    def convert_norm(cls, x: Sizes, *norms: ActivationNorm) -> "LipschitzBounds":
        """Return the bounds of reading the input in other norms; `outputs` has the sizes in these.

        Give a norm for each array. Raise `ValueError` if the input has another number of arrays, or
        its norm does not bound the new norm.
        """
        sizes, count = jax.tree.leaves(x), len(norms)
        if len(sizes) != count or (count == 1) != isinstance(x, NormBound):
            wanted = "an array" if count == 1 else f"a tuple of {count} arrays"
            raise ValueError(f"expected {wanted}; got the sizes {x}")
        factors = list(map(factor_between, sizes, norms))
        converted = tuple(
            size if size.norm == norm else size.within(factor, norm=norm)
            for size, norm, factor in zip(sizes, norms, factors, strict=True)
        )
        same = cls.identity(converted[0] if count == 1 else converted)
        return dataclasses.replace(same, slopes=np.diag(np.array(factors, float)))

    @classmethod
    def read_length(cls, x: Sizes, axes: int = 1, features: int | None = None) -> "LipschitzBounds":
        """Return `convert_norm` to RMS, or to the array's own norm if it is `L2` over enough axes.

        Args:
          x: the size of the input.
          axes: the least number of axes of an `L2` norm that is kept.
          features: the required length of the last axis; None for any.
        """
        length = isinstance(x, NormBound) and x.is_length(axes)
        read = cls.convert_norm(x, x.norm if length else RMS())
        read.outputs.expect_features(features)
        return read

    def then(self, after: "LipschitzBounds") -> "LipschitzBounds":
        """Return the bounds of this module followed by the module of `after`."""
        return LipschitzBounds(
            after.outputs,
            nonnegative_product(after.slopes, self.slopes),
            nonnegative_product(after.slopes, self.weights) + after.weights,
            (*self.reasons, *after.reasons),
        )

    def then_of(self, outputs: NormBound, slopes: Any, **others: Any) -> "LipschitzBounds":
        """Return `then` for a module with one output array; for the arguments see `of`."""
        return self.then(LipschitzBounds.of(outputs, slopes, **others))


def nonnegative_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply non-negative arrays: 0 times infinity is 0, and no other product becomes 0."""
    finite = [np.where(np.isfinite(array), array, 0.0) for array in (a, b)]
    # Numbers of positive products, and of positive products without an infinite factor.
    positive, bounded = (1.0 * (x > 0) @ (1.0 * (y > 0)) for x, y in ((a, b), finite))
    with np.errstate(over="ignore"):  # overflow gives infinity
        result = np.where(positive > 0, np.maximum(finite[0] @ finite[1], LEAST), 0.0)
    return np.where(positive > bounded, np.inf, result)
