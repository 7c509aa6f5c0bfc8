"""Arrays on meshes: inside `jax.shard_map`, on explicit axes, and work divided over devices.

Left to the compiler, a mesh divides the matrices of a stack, and then every product of an iteration
communicates, or it divides nothing, and then every device does all the work. `solve_by_owners`
gives each device its own share of the stack.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

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


Tree = TypeVar("Tree")


def match_varying_axes(tree: Tree, *others: Any) -> Tree:
    """Return a tree whose arrays vary over every axis of a mesh over which any given array varies.

    Inside of `jax.shard_map` the carry of a loop has to start with the axes that its results have.
    Elsewhere the tree is returned as it is.

    Args:
      tree: a pytree of arrays, to be carried by one loop.
      others: pytrees of arrays that go into the loop on its way.
    """
    if not inside_shard_map():
        return tree
    # `lax.select` exists in every supported JAX, and its output varies over the axes of its
    # operands; XLA removes it.
    unset = [jnp.zeros_like(x, bool, shape=()) for x in jax.tree.leaves((tree, others))]
    either = functools.reduce(jnp.logical_or, unset, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jax.lax.select(either, jnp.asarray(x), jnp.asarray(x)), tree)


def inside_shard_map() -> bool:
    """Return whether tracing happens inside `jax.shard_map`: devices hold their own arrays."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def explicit_mesh(x: Any) -> Any:
    """Return the mesh of an array whose sharding is part of its type, or None."""
    if not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def replicated_like(tree: Any, like: Any) -> Any:
    """Return `tree` replicated over the mesh of `like`, as a step will return it.

    Inside jit only an explicit mesh is known (and needed); outside, every mesh. Inside of
    `jax.shard_map` every device holds what it works on, and `tree` varies as `like` does.
    """
    if inside_shard_map():
        return match_varying_axes(tree, like)
    if isinstance(like, Tracer):
        mesh = explicit_mesh(like)
        place = jax.sharding.reshard
    else:
        mesh = getattr(getattr(like, "sharding", None), "mesh", None)
        place = jax.device_put
    return tree if mesh is None else place(tree, NamedSharding(mesh, PartitionSpec()))


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """Return `x` with the sharding of `like`, if it has one; inside jit, an explicit one."""
    if inside_shard_map():
        return x
    if isinstance(like, Tracer) or isinstance(x, Tracer):
        if explicit_mesh(like) is None:
            return x
        # Always `x`; a program without an argument on the mesh would not know its devices.
        return jax.lax.select(True, jax.sharding.reshard(x, jax.typeof(like).sharding), like)
    sharding = getattr(like, "sharding", None)  # NumPy arrays have none, abstract ones may
    return x if sharding is None else jax.device_put(x, sharding)


def working_mesh(example: Any) -> Any:
    """Return the mesh to divide work over, or None: `jax.set_mesh` under `jax.jit`, axes automatic.

    Outside a compiled program arrays lie where they lie; within `jax.shard_map` the axes are in the
    hands of whoever called it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(example, Tracer) or mesh.empty or mesh.size == 1:
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def divided_alike(tree: Any, like: Any) -> Any:
    """Return arrays divided as those of `like`, where the compiler would choose otherwise.

    That is on a working mesh. `None` and empty nodes stay.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return tree

    def alike(x: Any, y: Any) -> Any:
        both = isinstance(x, jax.Array) and isinstance(y, jax.Array)
        return shard_alike(x, y)[0] if both and working_mesh(y) is not None else x

    return jax.tree.map(alike, tree, like, is_leaf=lambda node: not jax.tree.leaves(node))


def solve_by_owners(
    mesh: Any, function: Callable[..., Any], batch_ndim: int, arguments: tuple[Any, ...]
) -> Any:
    """Return `function(*arguments)`, with leading axes divided over the devices of the mesh.

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
    """Return the axes with the most devices of which `count` problems keep half or more busy."""
    some = [s for k in range(len(sizes) + 1) for s in itertools.combinations(sizes, k)]
    owners = {axes: math.prod(sizes[name] for name in axes) for axes in some}
    busy = [axes for axes, n in owners.items() if 2 * count >= -(-count // n) * n]
    return max(busy, key=lambda axes: owners[axes])


def _spread(x: jax.Array, names: tuple[str, ...], axes: tuple[int, ...]) -> jax.Array:
    """Return the stack divided over these axes of the mesh, by its first axis that they divide."""
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
