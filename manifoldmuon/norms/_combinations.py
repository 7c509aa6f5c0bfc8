"""Ways to combine the norms of layers into one norm, and the duality maps of the wholes."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

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


@dataclasses.dataclass(frozen=True)
class Max(Combination):
    """The largest: the modular norm (arXiv:2405.14813). Every layer moves at full length."""

    def norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return MaxAbs(ndim=1).norm(sizes)

    def dual_norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return MaxAbs(ndim=1).dual_norm(sizes)

    def dualize(self, sizes: Float[Array, " layers"]) -> Float[Array, " layers"]:
        return MaxAbs(ndim=1).dualize(sizes)


@dataclasses.dataclass(frozen=True)
class Sum(Combination):
    """The sum: only the layer of the largest dual norm moves (duality-structure descent).

    The first of several equal ones.
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
class RootSumSquares(Combination):
    """The Euclidean length: a layer moves in proportion to its dual norm."""

    def norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return Frobenius(ndim=1).norm(sizes)

    def dual_norm(self, sizes: Float[Array, " layers"]) -> Float[Array, ""]:
        return Frobenius(ndim=1).norm(sizes)

    def dualize(self, sizes: Float[Array, " layers"]) -> Float[Array, " layers"]:
        return Frobenius(ndim=1).dualize(sizes)


def product_norm(
    norms: PyTree[Norm], weights: PyTree, combination: Combination = Max()
) -> Float[Array, ""]:
    """The norm on a tree of weights: the combination of its leaves' norms.

    Args:
      norms: a tree of norms, a prefix of `weights`.
      weights: a tree of arrays; each copy along leading axes is a layer by itself.
      combination: how the norms of layers combine.
    """
    values = [norm.norm(weight) for norm, weight in _pairs(norms, weights)]
    return combination.norm(_flat(values))


def product_dual_norm(
    norms: PyTree[Norm], grads: PyTree, combination: Combination = Max()
) -> Float[Array, ""]:
    """The dual of `product_norm`: of the maximum, the sum of the leaves' dual norms."""
    values = [norm.dual_norm(grad) for norm, grad in _pairs(norms, grads)]
    return combination.dual_norm(_flat(values))


def product_dualize(norms: PyTree[Norm], grads: PyTree) -> PyTree:
    """The duality map of `product_norm` for the maximum: leaf by leaf."""
    return jax.tree.map(lambda norm, branch: jax.tree.map(norm.dualize, branch), norms, grads)


def _flat(values: list[Array]) -> Float[Array, " layers"]:
    return jnp.concatenate([value.ravel() for value in values])


def _pairs(norms: PyTree[Norm], arrays: PyTree) -> list[tuple[Norm, Array]]:
    """Every array with its norm, where `norms` is a prefix of `arrays`."""
    leaves, structure = jax.tree.flatten(norms)
    branches = structure.flatten_up_to(arrays)
    pairs = [
        (n, leaf)
        for n, branch in zip(leaves, branches, strict=True)
        for leaf in jax.tree.leaves(branch)
    ]
    if not pairs:
        raise ValueError("a product space needs at least one weight, but the tree has no leaves")
    return pairs
