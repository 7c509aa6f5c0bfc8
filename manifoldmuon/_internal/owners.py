"""Stacks of matrices divided over the devices of a mesh: each device solves its own share.

Left to the compiler, a mesh divides the matrices of a stack, and then every product of an iteration
communicates, or it divides nothing, and then every device does all the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str, ...]

# Entries of a matrix whose products are worth dividing, against gathers that cost about as much as
# products. Compiled for TPUs, a step of 24 matrices of 2**24 entries on 64 chips moved 78 times as
# many bytes divided, and one of 80 of 2**28 on 256 chips no longer fitted.
_LARGE = 2**30


class Division(NamedTuple):
    """Axes of a mesh that divide a stack of matrices.

    Attributes:
      batch: for each leading axis, the axes of the mesh that divide it.
      rows: those that divide the rows of each matrix.
      columns: those that divide the columns.
    """

    batch: tuple[Axes, ...]
    rows: Axes = ()
    columns: Axes = ()


def solve_by_owners(
    mesh: Any,
    function: Callable[..., Any],
    batch_ndim: int,
    arguments: tuple[Any, ...],
    division: Division | None = None,
) -> Any:
    """Return `function(*arguments)`, with leading axes divided over the devices of the mesh.

    Axes of the mesh that divide leading axes of the arguments stay where they are: the devices that
    share a part of the stack exchange matrices among themselves, all to all and once. A part
    whose number of matrices these devices do not divide is filled up with zeros.

    Matrices of `_LARGE` entries or more that are too few for all devices are given to groups of
    them (those that differ along some axes of the mesh), and each group divides the products.

    Args:
      mesh: from `working_mesh`.
      function: treats the leading `batch_ndim` axes as independent problems; all its arguments and
        results have them first.
      batch_ndim: how many leading axes there are, at least 1; the first one counts leaves.
      arguments: trees of arrays; the first is an array of points.
      division: of the arguments and of the results that have the shape of the points. Where
        nobody knows it, what is likely: see `_likely`. A wrong one costs communication.
    """
    point = arguments[0]
    batch, matrix = point.shape[:batch_ndim], point.shape[batch_ndim:]
    count = math.prod(batch)
    large = point.size // count >= _LARGE
    owners = _owning_axes(dict(mesh.shape), count) if large else mesh.axis_names
    group = tuple(name for name in mesh.axis_names if name not in owners)
    held, rows, columns = division or _likely(mesh, owners, batch)
    *held, rows, columns = (_among(axes, owners) for axes in (*held, rows, columns))
    stay, moved = tuple(itertools.chain(*held)), rows + columns
    tiles = _size(mesh, rows), _size(mesh, columns)
    # Axes of which nothing is known leave the matrices one by one, the last of the mesh first: of
    # an axis of matrices that several axes of a mesh divide, only the last can leave.
    free = tuple(name for name in reversed(owners) if name not in stay + moved)

    # Every axis that is held is cut into its parts and the rest, and the parts come first.
    parts = [_size(mesh, axes) for axes in held]
    cut = [n for whole, part in zip(batch, parts, strict=True) for n in (part, whole // part)]
    order = [*range(0, 2 * batch_ndim, 2), *range(1, 2 * batch_ndim, 2)]
    outer = math.prod(parts)
    inner = count // outer
    padding = -inner % _size(mesh, free + moved)
    # No axis is filled up while it is divided. Nor may two axes of the mesh leave a guessed stack's
    # matrices at once: for that the compiler gathers the stack.
    whole_first = padding or (stay and division is None)
    stages = [free[:i] for i in range(0 if whole_first else 1, len(free))]

    def flatten(x):
        tail = x.shape[batch_ndim:]
        x = _pin(mesh, x, ()).reshape((*cut, *tail))
        x = x.transpose((*order, *range(len(cut), x.ndim))).reshape((outer, inner, *tail))
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * len(tail)) if padding else x
        for stage in stages:
            x = _pin(mesh, x, stay, stage)
        return x

    def restore(x):
        tail = x.shape[2:]
        for stage in reversed(stages):
            x = _pin(mesh, x, stay, stage)
        x = x[:, :inner].reshape((*[cut[i] for i in order], *tail))
        x = x.transpose((*[order.index(i) for i in range(len(cut))], *range(len(cut), x.ndim)))
        return _pin(mesh, x.reshape((*batch, *tail)), ())

    def travels(x):
        return bool(moved) and x.shape[2:] == matrix

    stacks = jax.tree.map(flatten, arguments)
    tiled, structure = jax.tree.map(travels, stacks), []

    def solve(*given):
        """Solve what this device owns, of `(outer, inner)` problems."""
        given = jax.tree.map(lambda x, t: _assemble(x, moved, tiles) if t else x, given, tiled)
        shape = given[0].shape[:2]
        point, *others = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), given)
        # Of the ways to divide the operands the one in which the compiler repeats the least work.
        point = _spread(point, group, (2, 1))
        others = jax.tree.map(lambda x: _spread(x, group, (1, 2)), others)
        found = jax.tree.map(lambda x: _spread(x, group, (2, 1)), function(point, *others))
        leaves, treedef = jax.tree.flatten(found)
        leaves = [x.reshape((*shape, *x.shape[1:])) for x in leaves]
        structure.append((treedef, [travels(x) for x in leaves]))
        sent = [_disperse(x, moved, tiles) for x in leaves if travels(x)]
        return sent, [x for x in leaves if not travels(x)]

    whole = PartitionSpec(stay or None, free + moved or None)
    divided = PartitionSpec(stay or None, free or None, rows or None, columns or None)
    if owners:
        solve = jax.shard_map(
            solve,
            mesh=mesh,
            in_specs=jax.tree.map(lambda t: divided if t else whole, tiled),
            out_specs=(divided, whole),
            axis_names=set(owners),
            check_vma=False,
        )
    sent, kept = map(iter, solve(*stacks))
    treedef, which = structure[-1]
    leaves = [restore(next(sent if tiled else kept)) for tiled in which]
    return jax.tree.unflatten(treedef, leaves)


def _likely(mesh: Any, owners: Axes, batch: tuple[int, ...]) -> Division:
    """Return how a stack is likely to be divided by automatic axes, which nobody sees.

    The last leading axis that the first axis of the mesh divides is held by that, as experts are.
    If two axes of the mesh divide the matrices instead, these move twice.
    """
    first = tuple(name for name in owners if mesh.shape[name] > 1)[:1]
    fits = [k for k in range(1, len(batch)) if batch[k] % _size(mesh, first) == 0]
    return Division(tuple(first if k in fits[-1:] else () for k in range(len(batch))))


def _assemble(x: jax.Array, axes: Axes, tiles: tuple[int, int]) -> jax.Array:
    """Return the whole matrices of a share of the second axis, from tiles of all of them."""
    outer, inner, *tile = x.shape
    (m, n), (s, t) = tile, tiles
    x = x.reshape((outer, s * t, -1, m, n))
    x = jax.lax.all_to_all(x, axes, 1, 1, tiled=True)
    x = x.reshape((outer, s, t, -1, m, n)).transpose((0, 3, 1, 4, 2, 5))
    return x.reshape((outer, inner // (s * t), s * m, t * n))


def _disperse(x: jax.Array, axes: Axes, tiles: tuple[int, int]) -> jax.Array:
    """Undo `_assemble`."""
    outer, inner, m, n = x.shape
    s, t = tiles
    x = x.reshape((outer, inner, s, m // s, t, n // t)).transpose((0, 2, 4, 1, 3, 5))
    x = x.reshape((outer, s * t, inner, m // s, n // t))
    x = jax.lax.all_to_all(x, axes, 1, 1, tiled=True)
    return x.reshape((outer, s * t * inner, m // s, n // t))


def _pin(mesh: Any, x: jax.Array, *axes: Axes) -> jax.Array:
    """Return the stack with its first axes divided so, the others as the compiler likes."""
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    spec = PartitionSpec(*[names or None for names in axes], *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _among(axes: Axes, names: Axes) -> Axes:
    return tuple(name for name in axes if name in names)


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
