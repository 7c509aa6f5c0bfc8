"""The leaf engine: every link's way from a tree of parameters to its manifolds and back.

A link pairs updates with parameters (`pair_up`), asks for something at every leaf (`batched`) and
puts the answers back (`Places.fill`). Layouts are applied here and nowhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon._internal.mesh import inside_shard_map, match_varying_axes
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.optim._geometry import (
    Geometry,
    Places,
    find_manifolds,
    flatten_with_path,
    if_complex,
    inner_shape,
    is_hole,
    manifold_of,
    path_string,
)
from manifoldmuon.optim._owners import solve_by_owners, working_mesh

Entry = Manifold | LaidOut

# Leaves of one kind that are stacks already, as a scan over layers wants them: on a CPU so few are
# sooner solved one by one (q, k, v and o: 5 to 9 % of a step) than copied into a larger stack.
_FEW = 8


class LikePoint(NamedTuple):
    """Marks an array as one of the parameter's shape, for `batched`, which moves its axes."""

    array: Any


class Leaf(NamedTuple):
    """One parameter that is being updated; `place` is its place in the tree."""

    place: int
    path: str
    entry: Entry
    param: jax.Array
    update: jax.Array


class Paired(NamedTuple):
    """Updates and their parameters.

    Attributes:
      places: of the tree.
      updates: the tree of updates; those of arrays without entries are in the parameter's dtype.
      leaves: what there is to work on. Places without a parameter or without an update, and arrays
        without entries, are not among them: their update passes through.
    """

    places: Places
    updates: Any
    leaves: list[Leaf]

    def filled(self, updates: Sequence[Any]) -> Any:
        """The tree of updates, with new ones for the leaves."""
        pairs = zip(self.leaves, updates, strict=True)
        return self.places.fill(self.updates, {leaf.place: update for leaf, update in pairs})


def pair_up(geometry: Geometry, updates: Any, params: Any, name: str) -> Paired:
    """Pairs every update with its parameter and manifold.

    Args:
      geometry: see `resolve`.
      updates: the incoming updates.
      params: the current parameters.
      name: the transformation's name for error messages.

    Raises:
      ValueError: if `params` is None, or the trees or shapes differ.
      TypeError: if an update is not floating point.
    """
    if params is None:
        raise ValueError(
            f"{name} needs the current parameters: call tx.update(updates, state, params)."
        )
    places = find_manifolds(geometry, params)
    check_alike(name, places, updates, params)
    pairs = zip(places.leaves(params), places.leaves(updates), strict=True)
    leaves, empty = [], {}
    for place, (param, update) in enumerate(pairs):
        if is_hole(param) or is_hole(update):
            continue
        path = places.paths[place]
        if not jnp.issubdtype(jnp.result_type(update), jnp.floating):
            raise TypeError(
                f"{name}: the update of {path!r} has dtype {jnp.result_type(update)}; give the"
                " gradient of a real floating point parameter"
                f"{if_complex(jnp.result_type(update))}."
            )
        if jnp.size(update):
            arrays = jnp.asarray(param), jnp.asarray(update)
            leaves.append(Leaf(place, path, places.values[place], *arrays))
        else:
            empty[place] = jnp.zeros_like(param)
    return Paired(places, places.fill(updates, empty) if empty else updates, leaves)


def check_alike(name: str, places: Places, updates: Any, params: Any) -> None:
    """Raise `ValueError` unless updates and parameters are trees of one structure and shapes."""
    if (found := jax.tree.structure(updates, is_leaf=is_hole)) != places.treedef:
        raise ValueError(f"{name}: {_difference(places, updates, found)}")
    pairs = zip(places.paths, places.leaves(params), places.leaves(updates), strict=True)
    for path, param, update in pairs:
        if is_hole(param) or is_hole(update) or jnp.shape(update) == jnp.shape(param):
            continue
        raise ValueError(
            f"{name}: the update of {path!r} has shape {jnp.shape(update)}, the parameter"
            f" {jnp.shape(param)}."
        )


def _difference(places: Places, updates: Any, found: Any) -> str:
    pairs, _ = flatten_with_path(updates, is_leaf=is_hole)
    names = [path_string(path) for path, _ in pairs]
    missing = [path for path in places.paths if path not in names]
    extra = [path for path in names if path not in places.paths]
    if missing or extra:
        return (
            "updates and parameters are different trees: parameters without an update"
            f" {missing}, updates without a parameter {extra}."
        )
    return (
        f"updates and parameters are trees of different containers: {found} against"
        f" {places.treedef}."
    )


def batched(
    function: Callable[..., Any],
    entries: Sequence[Entry],
    arguments: Sequence[tuple[Any, ...]],
    *,
    divide: bool = False,
    stack: bool = True,
) -> list[Any]:
    """Calls a function for many leaves; those of one kind are stacked into one call.

    Leaves are of one kind when manifold, shapes, dtypes and shardings agree, so the number of
    compiled solvers does not grow with depth, and an accelerator gets one large batch. Copying has
    a price on CPUs: a few leaves that are stacks themselves stay apart there.

    Args:
      function: `function(manifold, *arguments)` returns any tree of arrays. It treats leading axes
        as independent copies, and all of its arrays have them first.
      entries: the manifold of each leaf, or a `LaidOut`.
      arguments: trees of arrays for each leaf. A `LikePoint` has the parameter's shape, and
        arrives as an array in the manifold's layout.
      divide: whether the work is worth moving matrices for: on a mesh of `jax.set_mesh` each
        device then solves its own share of the stacks.
      stack: not for a few operations by entry, which the compiler fuses with what is around them:
        a stack would have to be written, and read again.

    Returns:
      What the function gives for each leaf, in order, where a `LikePoint` stands for an array that
      is brought back into the parameter's layout. On a mesh with explicit axes such an array
      has the sharding of the leaf's first argument and all others are replicated.
    """
    kinds: dict[Any, list[int]] = {}
    for index, (entry, given) in enumerate(zip(entries, arguments, strict=True)):
        kinds.setdefault(_kind(entry, given) if stack else index, []).append(index)
    results: list[Any] = [None] * len(arguments)
    groups = [g for members in kinds.values() for g in _apart(members, entries, arguments, divide)]
    for members in groups:
        solve = functools.partial(_stacked, function, [entries[i] for i in members], divide)
        given = [arguments[i] for i in members]
        mesh = explicit_mesh(_first(given[0]))
        solved = solve(given) if mesh is None else _on_mesh(mesh, solve, given)
        for index, result in zip(members, solved, strict=True):
            results[index] = jax.tree.map(_unmarked, result, is_leaf=_is_marked)
    return results


def _kind(entry: Entry, given: tuple[Any, ...]) -> Any:
    """The same for leaves that can be stacked."""
    leaves, treedef = jax.tree.flatten(given, is_leaf=_is_marked)
    return manifold_of(entry), treedef, tuple(_describe(entry, x) for x in leaves)


def _describe(entry: Entry, x: Any) -> Any:
    array = _unmarked(x)
    # Inside jit only explicit shardings are known; outside, where the array really lies.
    where = jax.typeof(array) if isinstance(array, Tracer) else array
    sharding = getattr(where, "sharding", None)  # NumPy arrays have none
    shape = inner_shape(entry, array.shape) if _is_marked(x) else array.shape
    # On an explicit mesh the layout decides which axes of the stack are divided.
    layout = None if explicit_mesh(array) is None else entry
    return _is_marked(x), shape, jnp.dtype(array.dtype), sharding, layout


def _apart(
    members: list[int], entries: Sequence[Entry], arguments: Sequence[tuple[Any, ...]], divide: bool
) -> list[list[int]]:
    """The leaves of one kind in the groups in which they are stacked: all together, or each."""
    entry, first = entries[members[0]], _first(arguments[members[0]])
    copies = math.prod(first.shape[: first.ndim - entry.ndim])
    # On an explicit mesh, too, the stacks are divided: one large one leaves fewer devices idle.
    divided = divide and {working_mesh(first), explicit_mesh(first)} != {None}
    if copies == 1 or len(members) > _FEW or divided or jax.default_backend() != "cpu":
        return [members]
    return [[index] for index in members]


def _stacked(
    function: Callable[..., Any],
    entries: Sequence[Entry],
    divide: bool,
    arguments: Sequence[tuple[Any, ...]],
) -> list[Any]:
    """The function at leaves of one kind, with what it marks in their layouts."""
    shapes = [_first(given).shape for given in arguments]
    given = [
        jax.tree.map(lambda x, e=entry: _inward(e, x), argument, is_leaf=_is_marked)
        for entry, argument in zip(entries, arguments, strict=True)
    ]
    manifold = manifold_of(entries[0])
    mesh = working_mesh(_first(given)) if divide and manifold.ndim > 1 else None
    leading = _first(given[0]).ndim - manifold.ndim
    solve = functools.partial(function, manifold)
    if len(given) == 1 and mesh is None:
        results = [solve(*given[0])]
    else:
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)
        answer = solve(*stack) if mesh is None else solve_by_owners(mesh, solve, 1 + leading, stack)
        results = [
            jax.tree.map(lambda x, i=i: jax.lax.index_in_dim(x, i, keepdims=False), answer)
            for i in range(len(given))
        ]
    return [
        jax.tree.map(lambda x, e=e, s=shape: _outward(e, x, s), result, is_leaf=_is_marked)
        for e, shape, result in zip(entries, shapes, results, strict=True)
    ]


def _on_mesh(
    mesh: Any,
    solve: Callable[[Sequence[tuple[Any, ...]]], list[Any]],
    arguments: Sequence[tuple[Any, ...]],
) -> list[Any]:
    """`solve(arguments)` where shardings are explicit.

    Products of explicitly sharded operands want the sharding of every result spelled out, which
    no manifold can know; inside, the compiler chooses, as on an automatic mesh.
    """
    structure: list[Any] = []

    def inside(arguments):
        results = solve(arguments)
        leaves, treedef = jax.tree.flatten(results, is_leaf=_is_marked)
        structure[:] = treedef, [_is_marked(leaf) for leaf in leaves]
        marked = [leaf.array for leaf in leaves if _is_marked(leaf)]
        return marked, [leaf for leaf in leaves if not _is_marked(leaf)]

    sharding = jax.typeof(_first(arguments[0])).sharding
    outside = sharding, NamedSharding(mesh, PartitionSpec())
    automatic: Any = jax.sharding.auto_axes(inside, out_sharding=outside)
    marked, others = (iter(leaves) for leaves in automatic(arguments))
    treedef, marks = structure
    return jax.tree.unflatten(treedef, [next(marked if mark else others) for mark in marks])


def _is_marked(node: Any) -> bool:
    return isinstance(node, LikePoint)


def _unmarked(node: Any) -> Any:
    return node.array if isinstance(node, LikePoint) else node


def _first(given: Any) -> Any:
    """The first array of a leaf's arguments: its parameter or its update."""
    return jax.tree.leaves(given)[0]


def _inward(entry: Entry, x: Any) -> Any:
    if isinstance(x, LikePoint):
        return entry.layout.inward(x.array) if isinstance(entry, LaidOut) else x.array
    return x


def _outward(entry: Entry, x: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(x, LikePoint) and isinstance(entry, LaidOut):
        return LikePoint(entry.layout.outward(x.array, shape))
    return x


def explicit_mesh(x: Any) -> Any:
    """The mesh of an array whose sharding is part of its type; None for every other array."""
    if not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def replicated_like(tree: Any, like: Any) -> Any:
    """`tree` replicated over the mesh of `like`, so that its type is what a step will return.

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
    """`x` with the sharding of `like`, as far as it has one; inside jit, an explicit one."""
    if inside_shard_map():
        return x
    if isinstance(like, Tracer) or isinstance(x, Tracer):
        if explicit_mesh(like) is None:
            return x
        # Always `x`; a program without an argument on the mesh would not know its devices.
        return jax.lax.select(True, jax.sharding.reshard(x, jax.typeof(like).sharding), like)
    sharding = getattr(like, "sharding", None)  # NumPy arrays have none, abstract ones may
    return x if sharding is None else jax.device_put(x, sharding)


def _placeholder_type() -> type:
    """The stand-in for parameters with which optax finds them in a state."""
    seen = []

    def init(params):
        seen.append(type(params))
        return params

    optax.tree_utils.tree_map_params(init, lambda leaf: leaf, {})
    return seen[0]


_Placeholder = _placeholder_type()


def is_placeholder(params: Any) -> bool:
    """True where `optax.tree_utils.tree_map_params` asks for a state to look at."""
    return isinstance(params, _Placeholder)
