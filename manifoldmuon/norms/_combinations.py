"""Ways to combine the norms of layers into one norm."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.values import Value
from manifoldmuon.norms._norm import Norm
from manifoldmuon.norms._vectors import Frobenius, MaxAbs


class Combination(Value, abc.ABC):
    """A norm on the vector of the layers' norms, each in units of its budget.

    `N(w) = combine_k ||w_k|| / b_k` is a norm on all weights. With the layers' dual norms `d_k`
    its dual norm is the dual combination of the `b_k d_k`, and its duality map takes each layer's
    own steepest direction times `b_k c_k`, where `c` is the duality map of the combination at
    the vector of the `b_k d_k`.

    A frozen, hashable value; the three methods take a vector of numbers that are not negative.

    Examples:
      >>> lengths = jnp.array([1.0, 3.0])
      >>> [float(kind().norm(lengths)) for kind in (Max, Sum)]
      [3.0, 4.0]
    """

    @abc.abstractmethod
    def norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        """The combination of norms."""

    @abc.abstractmethod
    def dual_norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        """The combination of dual norms."""

    @abc.abstractmethod
    def dualize(self, sizes: Float[Array, " layers"]) -> Float[Array, " layers"]:
        """Return the share of each layer, of combined norm 1; zeros for zeros. NaN stays."""


class _NormOfSizes(Combination):
    """A norm of vectors, applied to the vector of sizes."""

    _of: ClassVar[Norm]

    def norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return self._of.norm(sizes)

    def dual_norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return self._of.dual_norm(sizes)

    def dualize(self, sizes: Float[Array, " layers"]) -> Float[Array, " layers"]:
        return self._of.dualize(sizes)


@dataclasses.dataclass(frozen=True)
class Max(_NormOfSizes):
    """The largest: the modular norm (arXiv:2405.14813). Every layer moves at full length.

    Examples:
      >>> Max().dualize(jnp.array([3.0, 4.0])).tolist()
      [1.0, 1.0]
    """

    _of: ClassVar[Norm] = MaxAbs(ndim=1)


@dataclasses.dataclass(frozen=True)
class Sum(Combination):
    """The sum: only the layer of the largest dual norm moves (duality-structure descent).

    The first of several equal ones.

    Examples:
      >>> Sum().dualize(jnp.array([3.0, 4.0])).tolist()
      [0.0, 1.0]
    """

    def norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return MaxAbs(ndim=1).dual_norm(sizes)

    def dual_norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return MaxAbs(ndim=1).norm(sizes)

    def dualize(self, sizes: Float[Array, " layers"]) -> Float[Array, " layers"]:
        if not sizes.size:
            return sizes
        largest = jax.nn.one_hot(jnp.argmax(sizes), sizes.size, dtype=sizes.dtype)
        # Times the sign: zeros for zeros. `argmax` takes a NaN for the largest.
        return largest * jnp.sign(jnp.max(sizes))


@dataclasses.dataclass(frozen=True)
class RootSumSquares(_NormOfSizes):
    """The Euclidean length: a layer moves in proportion to its dual norm.

    Examples:
      >>> round(float(RootSumSquares().norm(jnp.array([3.0, 4.0]))), 4)
      5.0
    """

    _of: ClassVar[Norm] = Frobenius(ndim=1)
