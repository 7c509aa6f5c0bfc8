"""Owner-computed stacks: on a mesh every device solves its own share of the leaves of one kind.

The compiler alone divides the matrices instead, and then every product of an iteration
communicates, or it divides nothing, and then every device does all the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def working_mesh(example: Any) -> Any:
    """The mesh to divide work over, or None: `jax.set_mesh`, under `jax.jit`, axes automatic.

    Outside a compiled program arrays lie where they lie; within `jax.shard_map` the axes are in the
    hands of whoever called it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(example, Tracer) or mesh.empty or mesh.size == 1:
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def solve_by_owners(
    mesh: Any, function: Callable[..., Any], batch_ndim: int, arguments: tuple[Any, ...]
) -> Any:
    """`function(*arguments)`, with the leading axes divided over all devices of the mesh.

    A number of problems that the devices do not divide is filled up with zeros. On their way to the
    owners and back the matrices are divided by rows: then they move all to all, once, whether the
    parameters are sharded or replicated.

    Args:
      mesh: from `working_mesh`.
      function: treats the leading `batch_ndim` axes as independent problems; all its arguments and
        results have them first.
      batch_ndim: how many leading axes there are, at least 1.
      arguments: trees of arrays.
    """
    batch = jax.tree.leaves(arguments)[0].shape[:batch_ndim]
    count = math.prod(batch)
    padding = -count % mesh.size

    def flatten(x):
        flat = x.reshape((count, *x.shape[batch_ndim:]))
        return jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1)) if padding else flat

    def restore(x):
        return _spread(mesh, x[:count]).reshape((*batch, *x.shape[1:]))

    owned = PartitionSpec(mesh.axis_names)
    solve = jax.shard_map(function, mesh=mesh, in_specs=owned, out_specs=owned, check_vma=False)
    stacks = jax.tree.map(lambda x: _spread(mesh, flatten(x)), arguments)
    return jax.tree.map(restore, solve(*stacks))


def _spread(mesh: Any, x: jax.Array) -> jax.Array:
    """The stack divided by the first axis that the devices divide, its own aside."""
    axes = [i for i in range(1, x.ndim) if x.shape[i] % mesh.size == 0]
    spec: list[Any] = [None] * x.ndim
    if axes:
        spec[axes[0]] = mesh.axis_names
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
