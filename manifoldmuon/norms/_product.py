"""The product space of several weights: the maximum of their norms."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from manifoldmuon.norms._norm import Norm


def product_norm(norms: PyTree[Norm], weights: PyTree) -> Float[Array, "..."]:
    """The norm on a tree of weights: the largest of its leaves' norms.

    Args:
      norms: a tree of norms, a prefix of `weights`. No leaf may have extra leading axes unless
        all have the same.
      weights: a tree of arrays.

    Returns:
      `max_k norm_k(w_k)`.
    """
    values = [norm.norm(weight) for norm, weight in _pairs(norms, weights)]
    return jnp.stack(values).max(axis=0)


def product_dual_norm(norms: PyTree[Norm], grads: PyTree) -> Float[Array, "..."]:
    """The dual of `product_norm`: the sum of the leaves' dual norms."""
    values = [norm.dual_norm(grad) for norm, grad in _pairs(norms, grads)]
    return jnp.stack(values).sum(axis=0)


def product_lmo(norms: PyTree[Norm], grads: PyTree) -> PyTree:
    """The duality map of `product_norm`: leaf by leaf."""
    return jax.tree.map(lambda norm, branch: jax.tree.map(norm.lmo, branch), norms, grads)


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
