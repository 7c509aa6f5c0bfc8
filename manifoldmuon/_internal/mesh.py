"""Helpers for code that runs inside `jax.shard_map`."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

Tree = TypeVar("Tree")


def match_varying_axes(tree: Tree, *others: Any) -> Tree:
    """`tree`, each array varying over every axis of a mesh over which any array given varies.

    Inside of `jax.shard_map` a loop has to begin with arrays that vary over the same axes as those
    that it goes on with. Elsewhere the tree comes back as it is.

    Args:
      tree: a pytree of arrays, to be carried by one loop.
      others: pytrees of arrays that go into the loop on its way.
    """
    if not inside_shard_map():
        return tree
    # By what stands in all versions of JAX: a choice varies as what it is made by. XLA removes it.
    unset = [jnp.zeros_like(x, bool, shape=()) for x in jax.tree.leaves((tree, others))]
    either = functools.reduce(jnp.logical_or, unset, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jax.lax.select(either, jnp.asarray(x), jnp.asarray(x)), tree)


def inside_shard_map() -> bool:
    """Return whether tracing happens inside `jax.shard_map`: devices hold their own arrays."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
