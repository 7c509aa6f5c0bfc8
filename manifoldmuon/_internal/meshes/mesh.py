"""Arrays on meshes: inside `jax.shard_map`, on explicit axes, and the mesh to divide work over."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def match_varying_axes(tree: Tree, *others: Any) -> Tree:
    """Make all arrays of a tree vary over every mesh axis over which any given array varies.

    Inside `jax.shard_map` the initial carry of a loop must vary over the same axes as its results:
    give the carry, then other arrays that the loop uses. Elsewhere the carry is returned unchanged.
    """
    if not inside_shard_map():
        return tree
    # `lax.select` exists in every supported JAX, and its output varies over the axes of its
    # operands; XLA removes it.
    unset = [jnp.zeros_like(x, bool, shape=()) for x in jax.tree.leaves((tree, others))]
    either = functools.reduce(jnp.logical_or, unset, jnp.zeros((), bool))
    return jax.tree.map(lambda x: jax.lax.select(either, jnp.asarray(x), jnp.asarray(x)), tree)


def inside_shard_map() -> bool:
    """Return whether tracing happens inside `jax.shard_map`, with arrays local to each device."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def explicit_mesh(x: Any) -> Any:
    """Return the mesh of an array with explicit axes (sharding as part of its type), or None."""
    if not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def with_automatic_axes(
    function: Callable[..., Any], mesh: Any, out_sharding: Any
) -> Callable[..., Any]:
    """Return `function` with the explicit axes of a mesh made automatic.

    `jax.sharding.auto_axes` alone refuses the axes that `jax.shard_map` has made manual.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple([name for name, kind in kinds if kind == AxisType.Explicit])
    automatic: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)
    return automatic


def replicated_like(tree: Any, like: Any) -> Any:
    """Return `tree` replicated over the mesh of `like`, as a step will return it.

    Inside jit only an explicit mesh is known (and needed); outside, every mesh. Inside
    `jax.shard_map` arrays are local, and `tree` then varies over the same axes as `like`.
    """
    if inside_shard_map():
        return match_varying_axes(tree, like)
    if isinstance(like, Tracer):
        mesh = explicit_mesh(like)
        put = jax.sharding.reshard
    else:
        mesh = getattr(getattr(like, "sharding", None), "mesh", None)
        put = jax.device_put
    return tree if mesh is None else put(tree, NamedSharding(mesh, PartitionSpec()))


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """Return `x` with the sharding of `like`, if any; inside jit, only if its mesh is explicit."""
    if inside_shard_map():
        return x
    if isinstance(like, Tracer) or isinstance(x, Tracer):
        if explicit_mesh(like) is None:
            return x
        # Always selects `x`; `like` tells the program its devices if no argument is on the mesh.
        return jax.lax.select(True, jax.sharding.reshard(x, jax.typeof(like).sharding), like)
    sharding = getattr(like, "sharding", None)  # NumPy arrays have none, abstract ones may
    if sharding is None or getattr(x, "sharding", None) == sharding:
        return x  # uncommitted to a device, it stays so
    return jax.device_put(x, sharding)


def whole_along(x: Any, axis: int) -> Any:
    """Return an array that no explicit mesh divides along this axis."""
    mesh = explicit_mesh(x)
    if mesh is None or inside_shard_map():
        return x
    spec = [*jax.typeof(x).sharding.spec, *[None] * x.ndim][: x.ndim]
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def working_mesh(example: Any) -> Any:
    """Return the mesh to divide work over, or None.

    It is the mesh of `jax.set_mesh`, under `jax.jit` and with automatic axes alone. Outside a
    compiled program arrays stay on their devices; inside `jax.shard_map` the caller divides work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(example, Tracer) or mesh.empty or mesh.size == 1:
        return None
    return mesh if all(kind == AxisType.Auto for kind in mesh.axis_types) else None


def mesh_of(x: Any) -> Any:
    """Return the mesh over which the work on an array can be divided, or None."""
    mesh = explicit_mesh(x)
    return working_mesh(x) if mesh is None else mesh


def warn_of_unset_mesh(params: Any, stacklevel: int) -> None:
    """Warn if concrete arrays are divided over automatic axes and no `jax.set_mesh` is active."""
    if not jax.sharding.get_abstract_mesh().empty:
        return
    for x in jax.tree.leaves(params):
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
            continue
        if all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
            warnings.warn(
                "parameters are divided over a mesh that is not set, so every device would solve"
                " all matrices: call init and the compiled step within jax.set_mesh(mesh), or give"
                " the mesh explicit axes.",
                stacklevel=stacklevel,
            )
            return
