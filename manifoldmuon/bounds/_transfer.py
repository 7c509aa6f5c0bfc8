"""Bounds on a module's output and on its response to perturbations: they compose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from manifoldmuon.bounds._sizes import Measure, NormBound, factor_between

Sizes = Any
"""A `Size`, or a tuple of such: one for each array that flows between two modules."""


@dataclasses.dataclass(frozen=True, eq=False)
class LipschitzBounds:
    """Bounds on a module's output and on its derivatives, for inputs of given sizes.

    The arrays that come in are numbered by i, those that go out by o, in the order in which their
    tuples are written. Perturbations are measured as their arrays are, and those of the weights
    by the modular norm of the whole network.

    Attributes:
      outputs: how large the output is: a `Size` or a tuple of them.
      slopes: `(o, i)`, how much output o moves per movement of input i.
      weights: `(o,)`, how much it moves per movement of the weights.
      alpha: `(o,)`, its second derivative in the weights.
      beta: `(o, i)`, in the weights and an input.
      gamma: `(o, i, i)`, in two inputs.
      reasons: why something is infinite.
      parts: the bounds of the module's parts.
    """

    outputs: Sizes
    slopes: np.ndarray
    weights: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    gamma: np.ndarray
    reasons: tuple[str, ...] = ()
    parts: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        outputs: Sizes,
        slopes: Any,
        *,
        weights: float = 0.0,
        beta: float = 0.0,
        gamma: Any = 0.0,
        reasons: tuple[str, ...] = (),
    ) -> "LipschitzBounds":
        """The transfer of a module with one output array.

        Args:
          outputs: its size.
          slopes: one for each input array; a number where there is one.
          weights: per movement of the weights.
          beta: the second derivative in weights and input.
          gamma: that in two inputs; broadcast to `(i, i)`.
          reasons: why something is infinite.
        """
        row = np.atleast_1d(np.asarray(slopes, float))
        count = len(row)
        return cls(
            outputs,
            row[None],
            np.array([weights], float),
            np.zeros(1),
            np.full((1, count), beta, float),
            np.broadcast_to(np.asarray(gamma, float), (1, count, count)).copy(),
            reasons,
        )

    def then(self, after: "LipschitzBounds") -> "LipschitzBounds":
        """The transfer of the composition."""
        s1, w1, s2, b2, g2 = self.slopes, self.weights, after.slopes, after.beta, after.gamma
        return LipschitzBounds(
            after.outputs,
            total("oj,ji->oi", s2, s1),
            total("oj,j->o", s2, w1) + after.weights,
            total("oj,j->o", s2, self.alpha)
            + after.alpha
            + 2 * total("oj,j->o", b2, w1)
            + total("ojk,j,k->o", g2, w1, w1),
            total("oj,ji->oi", s2, self.beta)
            + total("oj,ji->oi", b2, s1)
            + total("ojk,j,ki->oi", g2, w1, s1),
            total("oj,jil->oil", s2, self.gamma) + total("ojk,ji,kl->oil", g2, s1, s1),
            (*self.reasons, *after.reasons),
        )


def total(path: str, *arrays: np.ndarray) -> np.ndarray:
    """`np.einsum` of non-negative arrays, in which 0 times infinity is 0."""
    operands, result = path.split("->")
    names = operands.split(",")
    letters = result + "".join(sorted(set("".join(names)) - set(result)))
    product = np.ones(())
    for name, array in zip(names, arrays, strict=True):
        order = sorted(range(len(name)), key=lambda k, name=name: letters.index(name[k]))
        shape = [1] * len(letters)
        for axis, letter in enumerate(name):
            shape[letters.index(letter)] = array.shape[axis]
        factor = array.transpose(order).reshape(shape)
        with np.errstate(invalid="ignore"):
            product = np.where((product == 0) | (factor == 0), 0.0, product * factor)
    return product.sum(axis=tuple(range(len(result), len(letters))))


def identity(x: Sizes) -> LipschitzBounds:
    """The transfer of what changes nothing."""
    count = len(leaves(x))
    zero = np.zeros(count)
    square, cube = np.zeros((count, count)), np.zeros((count, count, count))
    return LipschitzBounds(x, np.eye(count), zero, zero, square, cube)


def side_by_side(transfers: list[LipschitzBounds]) -> LipschitzBounds:
    """The transfer of modules that read the same input."""
    return LipschitzBounds(
        tuple(t.outputs for t in transfers),
        *(
            np.concatenate([getattr(t, name) for t in transfers])
            for name in ("slopes", "weights", "alpha", "beta", "gamma")
        ),
        reasons=tuple(reason for t in transfers for reason in t.reasons),
    )


def convert_norm(x: Sizes, *measures: Measure) -> tuple[Any, LipschitzBounds]:
    """The input in the norms that a rule needs, and what it costs to bring it there.

    Args:
      x: the sizes of the input.
      *measures: one for each array; a single one for an input that is one array.

    Returns:
      One size, or a list of them where several measures are given; and a transfer that the rule's
      own comes after, `transfer.then(...)`.

    Raises:
      ValueError: the input has another number of arrays, or its norm does not bound this one.
    """
    sizes = leaves(x)
    if len(sizes) != len(measures) or (len(measures) == 1) != isinstance(x, NormBound):
        raise ValueError(
            f"expected {'an array' if len(measures) == 1 else f'a tuple of {len(measures)} arrays'}"
            f"; got the sizes {x}"
        )
    factors = [factor_between(size, measure) for size, measure in zip(sizes, measures, strict=True)]
    found = [
        size if factor == 1 and size.measure == measure else size.within(factor, measure=measure)
        for size, measure, factor in zip(sizes, measures, factors, strict=True)
    ]
    same = identity(tuple(found))
    converted = dataclasses.replace(same, slopes=np.diag(np.array(factors, float)))
    return (found[0] if len(found) == 1 else found), converted


def leaves(x: Sizes) -> list[NormBound]:
    """The sizes of a tuple of tuples, from left to right."""
    return [x] if isinstance(x, NormBound) else [size for part in x for size in leaves(part)]


def map_sizes(function: Callable[[NormBound], NormBound], x: Sizes) -> Sizes:
    """The same tuple of other sizes."""
    return (
        function(x) if isinstance(x, NormBound) else tuple(map_sizes(function, part) for part in x)
    )
