"""Owner-computed stacks: on a mesh every device solves its own share of the leaves of one kind.

The compiler alone divides the matrices instead, and then every product of an iteration
communicates, or it divides nothing, and then every device does all the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

try:
    from jax.experimental.shard_alike import shard_alike  # pyright: ignore[reportMissingImports]
except ImportError:  # gone in JAX 0.12, with nothing in its place: there the compiler chooses

    def shard_alike(x: Any, y: Any) -> tuple[Any, Any]:
        return x, y


# Entries of a matrix whose products are worth dividing, against gathers that cost about as much as
# products. Compiled for TPUs, a step of 24 matrices of 2**24 entries on 64 chips moved 78 times as
# many bytes divided, and one of 80 of 2**28 on 256 chips no longer fitted.
_LARGE = 2**30


def working_mesh(example: Any) -> Any:
    """The mesh to divide work over, or None: `jax.set_mesh`, under `jax.jit`, axes automatic.

    Outside a compiled program arrays lie where they lie; within `jax.shard_map` the axes are in the
    hands of whoever called it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(example, Tracer) or mesh.empty or mesh.size == 1:
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def divided_alike(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, divided as `like` is, where the compiler would otherwise choose: on a working mesh."""
    return x if working_mesh(like) is None else shard_alike(x, like)[0]


def solve_by_owners(
    mesh: Any, function: Callable[..., Any], batch_ndim: int, arguments: tuple[Any, ...]
) -> Any:
    """`function(*arguments)`, with the leading axes divided over the devices of the mesh.

    A number of problems that the devices do not divide is filled up with zeros. On their way to the
    owners and back the matrices are divided by rows: then they move all to all, once, whether the
    parameters are sharded or replicated.

    Matrices of `_LARGE` entries or more that are too few for all devices are given to groups of
    them (those that differ along some axes of the mesh), and each group divides the products.

    Args:
      mesh: from `working_mesh`.
      function: treats the leading `batch_ndim` axes as independent problems; all its arguments and
        results have them first.
      batch_ndim: how many leading axes there are, at least 1.
      arguments: trees of arrays; the first is an array of points.
    """
    point = arguments[0]
    batch, names = point.shape[:batch_ndim], mesh.axis_names
    count = math.prod(batch)
    owners = names if point.size // count < _LARGE else _owning_axes(dict(mesh.shape), count)
    group = tuple(name for name in names if name not in owners)
    padding = -count % math.prod(mesh.shape[name] for name in owners)

    def flatten(x):
        flat = x.reshape((count, *x.shape[batch_ndim:]))
        flat = jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1)) if padding else flat
        return _spread(flat, names, (1, 2))

    def restore(x):
        return _spread(x[:count], names, (1, 2)).reshape((*batch, *x.shape[1:]))

    def solve(point, *others):
        # Of the ways to divide the operands the one in which the compiler repeats the least work.
        point = _spread(point, group, (2, 1))
        others = jax.tree.map(lambda x: _spread(x, group, (1, 2)), others)
        return jax.tree.map(lambda x: _spread(x, group, (2, 1)), function(point, *others))

    stacks = jax.tree.map(flatten, arguments)
    if owners:
        solve = jax.shard_map(
            solve,
            mesh=mesh,
            in_specs=PartitionSpec(owners),
            out_specs=PartitionSpec(owners),
            axis_names=set(owners),
            check_vma=False,
        )
    return jax.tree.map(restore, solve(*stacks))


def _owning_axes(sizes: dict[str, int], count: int) -> tuple[str, ...]:
    """The axes with the most devices of which `count` problems keep half or more busy."""
    some = [s for k in range(len(sizes) + 1) for s in itertools.combinations(sizes, k)]
    owners = {axes: math.prod(sizes[name] for name in axes) for axes in some}
    busy = [axes for axes, n in owners.items() if 2 * count >= -(-count // n) * n]
    return max(busy, key=lambda axes: owners[axes])


def _spread(x: jax.Array, names: tuple[str, ...], axes: tuple[int, ...]) -> jax.Array:
    """The stack divided over the mesh's axes of these names, by the first axis that they divide."""
    if not names:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    size = math.prod(mesh.shape[name] for name in names)
    spec: list[Any] = [None] * x.ndim
    for axis in axes:
        if axis < x.ndim and x.shape[axis] % size == 0:
            spec[axis] = names
            break
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
