"""Ways to combine the norms of layers into one norm."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arrays import Numbers, Vectors
from manifoldmuon._internal.scales import ScaleRule
from manifoldmuon.norms._norm import Norm
from manifoldmuon.norms._vectors import Frobenius, MaxAbs


class Combination(Norm):
    """A norm on the vector of the layers' norms, each in units of its budget.

    `N(w) = combine_k ||w_k|| / b_k` is a norm on all weights. With the layers' dual norms `d_k`
    its dual norm is the dual combination of the `b_k d_k`, and its duality map takes each layer's
    own steepest direction times `b_k c_k`, where `c` is the duality map of the combination at
    the vector of the `b_k d_k`.

    Examples:
      >>> lengths = jnp.array([1.0, 3.0])
      >>> [float(kind().norm(lengths)) for kind in (Max, Sum)]
      [3.0, 4.0]
    """


@dataclasses.dataclass(frozen=True)
class Max(MaxAbs, Combination):
    """The largest: the modular norm (arXiv:2405.14813). Every layer moves at full length.

    Examples:
      >>> Max().dualize(jnp.array([3.0, 4.0])).tolist()
      [1.0, 1.0]
    """

    ndim: int = dataclasses.field(default=1, init=False)


@dataclasses.dataclass(frozen=True)
class Sum(Combination):
    """The sum: only the layer of the largest dual norm moves (duality-structure descent).

    The first of several equal ones.

    Examples:
      >>> Sum().dualize(jnp.array([3.0, 4.0])).tolist()
      [0.0, 1.0]
    """

    ndim: ClassVar[int] = 1

    def norm(self, weight: Vectors) -> Numbers:
        return Max().dual_norm(weight)

    def dual_norm(self, grad: Vectors) -> Numbers:
        return Max().norm(grad)

    def dualize(self, grad: Vectors) -> Vectors:
        if not grad.size:
            return grad
        place = jnp.argmax(jnp.abs(grad), axis=-1)  # of a NaN, where there is one
        value = jnp.take_along_axis(grad, place[..., None], axis=-1)
        return jax.nn.one_hot(place, grad.shape[-1], dtype=grad.dtype) * jnp.sign(value)


@dataclasses.dataclass(frozen=True)
class RootSumSquares(Frobenius, Combination):
    """The Euclidean length: a layer moves in proportion to its dual norm.

    Examples:
      >>> round(float(RootSumSquares().norm(jnp.array([3.0, 4.0]))), 4)
      5.0
    """

    ndim: int = dataclasses.field(default=1, init=False)
    scale: float | ScaleRule = dataclasses.field(default=1.0, init=False)
