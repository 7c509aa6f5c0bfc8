"""Solving equal leaves together: one batched call per kind of leaf, on any mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon.manifolds import Manifold


def together(
    method: Callable[..., tuple[Any, Any]],
    manifolds: Sequence[Manifold],
    problems: Sequence[tuple[Any, ...]],
) -> list[tuple[Any, Any]]:
    """Applies a method to many leaves; those of one kind are stacked into one batched call.

    Leaves are of one kind when manifold, shapes, dtypes and shardings agree, so the number of
    compiled solvers does not grow with depth, and an accelerator gets one large batch.

    Args:
      method: `method(manifold, *arrays) -> (array like the first, any tree of arrays)`.
      manifolds: the manifold of each leaf.
      problems: the arrays (or trees of arrays) of each leaf.

    Returns:
      What `method` gives for each leaf, in order. On a mesh with explicit axes the first result
      has the sharding of the leaf's first array and the others are replicated.
    """
    kinds: dict[Any, list[int]] = {}
    for index, (manifold, problem) in enumerate(zip(manifolds, problems, strict=True)):
        kinds.setdefault((manifold, _kind(problem)), []).append(index)
    results: list[Any] = [None] * len(problems)
    for (manifold, _), members in kinds.items():
        solved = _solve(lambda *x, m=manifold: method(m, *x), [problems[i] for i in members])
        for index, result in zip(members, solved, strict=True):
            results[index] = result
    return results


def _kind(problem: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(problem)
    return treedef, tuple((x.shape, jnp.dtype(x.dtype), _sharding(x)) for x in leaves)


def _sharding(x: jax.Array) -> Any:
    # Inside jit only explicit shardings are known; outside, where the array really lies.
    return jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding


def _solve(function: Callable[..., Any], problems: list[tuple[Any, ...]]) -> list[Any]:
    first = problems[0][0]
    mesh = explicit_mesh(first)
    if mesh is None:
        return _stack_and_solve(function, problems)
    # Products of explicitly sharded operands want the sharding of every result spelled out,
    # which no manifold can know; inside, the compiler chooses, as on an automatic mesh.
    outside = (jax.typeof(first).sharding, NamedSharding(mesh, PartitionSpec()))
    solve: Any = jax.sharding.auto_axes(
        lambda p: _stack_and_solve(function, p), out_sharding=[outside] * len(problems)
    )
    return solve(problems)


def _stack_and_solve(function: Callable[..., Any], problems: list[tuple[Any, ...]]) -> list[Any]:
    if len(problems) == 1:
        return [function(*problems[0])]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    solved = jax.vmap(function)(*stacked)
    return [
        jax.tree.map(lambda x, i=i: jax.lax.index_in_dim(x, i, keepdims=False), solved)
        for i in range(len(problems))
    ]


def explicit_mesh(x: Any) -> Any:
    """The mesh of an array whose sharding is part of its type; None for every other array."""
    if not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def replicated_like(tree: Any, like: Any) -> Any:
    """`tree` replicated over the mesh of `like`, so that its type is what a step will return.

    Inside jit only an explicit mesh is known (and needed); outside, every mesh.
    """
    if isinstance(like, Tracer):
        mesh = explicit_mesh(like)
        place = jax.sharding.reshard
    else:
        mesh = getattr(getattr(like, "sharding", None), "mesh", None)
        place = jax.device_put
    return tree if mesh is None else place(tree, NamedSharding(mesh, PartitionSpec()))


def placed_like(x: jax.Array, like: Any) -> jax.Array:
    """`x` with the sharding of `like`, as far as it has one."""
    if isinstance(like, Tracer):
        explicit = explicit_mesh(like) is not None
        return jax.sharding.reshard(x, jax.typeof(like).sharding) if explicit else x
    return jax.device_put(x, like.sharding) if isinstance(like, jax.Array) else x
