"""Stacks of matrices divided over the devices of a mesh: each device solves its own share.

Left to the compiler, a mesh divides the matrices of a stack, and then every product of an iteration
communicates, or it divides nothing, and then every device does all the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Axes = tuple[str, ...]

# Entries of a matrix whose products are worth dividing, against gathers that cost about as much as
# products. Compiled for TPUs, a step of 24 matrices of 2**24 entries on 64 chips moved 78 times as
# many bytes divided, and one of 80 of 2**28 on 256 chips no longer fitted.
_LARGE = 2**30
# Entries of a matrix that wants no batch, and how much less work the busiest device must have for
# solving one by one. Compiled for TPUs, that takes 8 to 23 % more cycles for the same matrices.
_SMALL, _GAIN = 2**16, 1.15


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


class Problems(NamedTuple):
    """A stack of independent problems.

    Attributes:
      function: treats leading axes as independent problems; all its arguments and results have
        them first.
      batch_ndim: how many leading axes there are, at least 1; the first one counts leaves.
      arguments: trees of arrays; the first is an array of points.
      division: of the arguments and of the results that have the shape of the points. Where
        nobody knows it, what is likely: see `_likely`. A wrong one costs communication.
    """

    function: Callable[..., Any]
    batch_ndim: int
    arguments: tuple[Any, ...]
    division: Division | None = None


def solve_by_owners(mesh: Any, stacks: Sequence[Problems]) -> list[Any]:
    """Return `function(*arguments)` for every stack, divided over the devices of the mesh.

    Axes of the mesh that divide leading axes of the arguments stay where they are: the devices that
    share a part of the stack exchange matrices among themselves, all to all and once. Of a part
    whose number of matrices these devices do not divide, some of them solve one more than others.

    Matrices of `_LARGE` entries or more that are too few for all devices are given to groups of
    them (those that differ along some axes of the mesh), and each group divides the products.

    Args:
      mesh: from `working_mesh`.
      stacks: of problems.
    """
    shares = _place_leftovers(mesh, [_share(mesh, problems) for problems in stacks])
    pairs = list(zip(shares, stacks, strict=True))
    given = [share.send(problems.arguments) for share, problems in pairs]
    # An exchange makes every device wait for the slowest. Where devices have unlike numbers of
    # matrices, work is equal only over all stacks: so nothing is exchanged between them.
    wait = any(share.one_by_one for share in shares)
    given = jax.lax.optimization_barrier(given) if wait else given
    found = [s.solve(p.function, x) for (s, p), x in zip(pairs, given, strict=True)]
    found = jax.lax.optimization_barrier(found) if wait else found
    return [share.bring_back(x) for share, x in zip(shares, found, strict=True)]


class _Share(NamedTuple):
    """How a stack of matrices goes to its owners.

    Attributes:
      mesh: whose devices own matrices.
      batch: the leading axes.
      matrix: rows and columns.
      held: for each leading axis, the axes of the mesh that divide it and stay.
      rows: the axes of the mesh that divide rows, and divide the matrices instead.
      columns: those that divide columns, likewise.
      free: axes of which nothing is known; they divide the matrices, too.
      group: axes that divide the products of each matrix.
      guessed: whether the division is a guess.
      first: the first of the devices that solve one matrix more.
      one_by_one: whether each device solves just the matrices that it has.
    """

    mesh: Any
    batch: tuple[int, ...]
    matrix: tuple[int, ...]
    held: tuple[Axes, ...]
    rows: Axes
    columns: Axes
    free: Axes
    group: Axes
    guessed: bool
    first: int = 0
    one_by_one: bool = False

    @property
    def stay(self) -> Axes:
        return tuple(itertools.chain(*self.held))

    @property
    def moved(self) -> Axes:
        return self.rows + self.columns

    @property
    def devices(self) -> int:
        """How many devices share a part of the stack."""
        return _size(self.mesh, self.free + self.moved)

    @property
    def inner(self) -> int:
        """How many matrices a part has."""
        return math.prod(self.batch) // _size(self.mesh, self.stay)

    @property
    def left(self) -> int:
        """How many matrices of a part are left over when each device has as many."""
        return self.inner % self.devices

    @property
    def whole(self) -> PartitionSpec:
        """Of whole matrices at their owners."""
        return PartitionSpec(self.stay or None, self.free + self.moved or None)

    def send(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return stacks of shape `(parts, slots, ...)`, whole matrices at their owners."""

        def send(x):
            tail, (cut, order) = x.shape[len(self.batch) :], self._cut()
            x = _pin(self.mesh, x, ()).reshape((*cut, *tail))
            x = x.transpose((*order, *range(len(cut), x.ndim))).reshape((-1, self.inner, *tail))
            x = _deal(x, self.devices, self.first)
            for stage in self._stages():
                x = _pin(self.mesh, x, self.stay, stage)
            return self._exchange(_assemble, x) if self._travels(x) else x

        return jax.tree.map(send, arguments)

    def solve(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Return the function of what every device owns."""

        def solve(*given):
            shape = given[0].shape[:2]
            point, *others = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), given)
            # Of the ways to divide the operands the one in which the compiler repeats the least
            # work.
            point = _spread(point, self.group, (2, 1))
            others = jax.tree.map(lambda x: _spread(x, self.group, (1, 2)), others)
            if self.one_by_one:
                place = jax.lax.axis_index(self.free + self.moved)
                more = (place - self.first) % self.devices < self.left
                count = self.inner // self.devices + more
                found = _solve_some(function, count, (point, *others))
            else:
                found = function(point, *others)
            found = jax.tree.map(lambda x: _spread(x, self.group, (2, 1)), found)
            return jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), found)

        return self._at_owners(solve, self.whole, self.whole)(*given)

    def bring_back(self, found: Any) -> Any:
        """Return results in the place of the arguments: undo `send`."""

        def bring_back(x):
            tail, (cut, order) = x.shape[2:], self._cut()
            x = self._exchange(_disperse, x) if self._travels(x) else x
            for stage in reversed(self._stages()):
                x = _pin(self.mesh, x, self.stay, stage)
            x = _collect(x, self.inner, self.devices, self.first)
            x = x.reshape((*[cut[i] for i in order], *tail))
            x = x.transpose((*[order.index(i) for i in range(len(cut))], *range(len(cut), x.ndim)))
            return _pin(self.mesh, x.reshape((*self.batch, *tail)), ())

        return jax.tree.map(bring_back, found)

    def _cut(self) -> tuple[list[int], list[int]]:
        """Return every leading axis cut into parts and their length; and all parts first."""
        pairs = [(n, _size(self.mesh, axes)) for n, axes in zip(self.batch, self.held, strict=True)]
        cut = [size for n, parts in pairs for size in (parts, n // parts)]
        return cut, [*range(0, len(cut), 2), *range(1, len(cut), 2)]

    def _stages(self) -> list[Axes]:
        """Return axes of the mesh that divide the matrices of a part, from stage to stage.

        No axis is filled up while it is divided. Nor may two axes of the mesh leave a guessed
        stack's matrices at once: for that the compiler gathers the stack.
        """
        whole_first = self.left or (self.stay and self.guessed)
        return [self.free[:i] for i in range(0 if whole_first else 1, len(self.free))]

    def _travels(self, x: jax.Array) -> bool:
        return bool(self.moved) and x.shape[2:] == self.matrix

    def _exchange(self, function: Callable[..., Any], x: jax.Array) -> jax.Array:
        """Return the stack after `_assemble` or `_disperse`."""
        divided = PartitionSpec(
            self.stay or None, self.free or None, self.rows or None, self.columns or None
        )
        ends = (divided, self.whole) if function is _assemble else (self.whole, divided)
        tiles = _size(self.mesh, self.rows), _size(self.mesh, self.columns)
        return self._at_owners(lambda x: function(x, self.moved, tiles), *ends)(x)

    def _at_owners(self, function: Callable[..., Any], before: Any, after: Any) -> Any:
        owners = tuple(name for name in self.mesh.axis_names if name not in self.group)
        if not owners:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=before,
            out_specs=after,
            axis_names=set(owners),
            check_vma=False,
        )


def _share(mesh: Any, problems: Problems) -> _Share:
    """Return how these problems go to their owners."""
    point, ndim = problems.arguments[0], problems.batch_ndim
    batch, matrix = point.shape[:ndim], point.shape[ndim:]
    count = math.prod(batch)
    large = point.size // count >= _LARGE
    owners = _owning_axes(dict(mesh.shape), count) if large else mesh.axis_names
    group = tuple(name for name in mesh.axis_names if name not in owners)
    held, rows, columns = problems.division or _likely(mesh, owners, batch)
    *held, rows, columns = (_among(axes, owners) for axes in (*held, rows, columns))
    # Matrices leave axes of which nothing is known one by one, the last of the mesh first: of an
    # axis of matrices that several axes of a mesh divide, only the last can leave.
    taken = (*itertools.chain(*held), *rows, *columns)
    free = tuple(name for name in reversed(owners) if name not in taken)
    guessed = problems.division is None
    return _Share(mesh, batch, matrix, tuple(held), rows, columns, free, group, guessed)


def _place_leftovers(mesh: Any, shares: list[_Share]) -> list[_Share]:
    """Return the shares with the first of the devices that solve one matrix more than others.

    The others follow it in a circle. Of the most expensive kind first, the matrices that are left
    over go to the neighbours that have the least work. Where that pays, for the busiest device
    against as many matrices for each, devices solve just what they have.
    """
    costs = []
    for share in shares:
        m, n = max(share.matrix[-2:]), min(share.matrix[-2:])
        # Multiplications of `muon`: a Gram matrix, four quintic steps of its size, and a product.
        costs.append((2.0 * m * n**2 + 12.0 * n**3) / _size(mesh, share.group))
    grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    work, filled, firsts = np.zeros(mesh.size), 0.0, [0] * len(shares)
    for i in sorted(range(len(shares)), key=lambda i: -costs[i]):
        devices, left = shares[i].devices, shares[i].left
        # Kinds count devices in an order of their own, and all parts of a stack alike.
        axes = [mesh.axis_names.index(name) for name in shares[i].free + shares[i].moved]
        places = np.moveaxis(grid, axes, range(len(axes))).reshape((devices, -1))
        load = work[places].sum(1)
        before = np.cumsum([0, *load, *load])
        firsts[i] = int(np.argmin(before[left : left + devices] - before[:devices]))
        work[places[(firsts[i] + np.arange(left)) % devices]] += costs[i]
        each = shares[i].inner // devices
        work += each * costs[i]
        filled += (each + (left > 0)) * costs[i]
    pays, placed = filled > _GAIN * work.max(), []
    for share, first in zip(shares, firsts, strict=True):
        large = math.prod(share.matrix) >= _SMALL and not share.group
        placed.append(share._replace(first=first, one_by_one=bool(pays and large and share.left)))
    return placed


def _solve_some(function: Callable[..., Any], count: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the function of the first `count` problems, one after the other; zeros beyond them."""
    one = jax.tree.map(lambda x: x[:1], arguments)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *one))

    def solve(slot):
        index, given = slot
        given = jax.tree.map(lambda x: x[None], given)
        with jax.named_scope("own_matrix"):  # for who reads or profiles the program
            return jax.lax.cond(index < count, function, lambda *_: nothing, *given)

    indices = jnp.arange(arguments[0].shape[0])
    return jax.tree.map(lambda x: x[:, 0], jax.lax.map(solve, (indices, arguments)))


def _deal(x: jax.Array, devices: int, first: int) -> jax.Array:
    """Return a stack with as many slots of its second axis for each device.

    Those that are left over go to devices from `first` on, one to each. The others get a copy of
    the first: zeros are far from most sets, and take the longest to solve.
    """
    outer, count, *matrix = x.shape
    each, left = divmod(count, devices)
    if not left:
        return x
    fuller, others = x[:, : left * (each + 1)], x[:, left * (each + 1) :]
    others = others.reshape((outer, devices - left, each, *matrix))
    copies = jnp.broadcast_to(x[:, None, :1], (outer, devices - left, 1, *matrix))
    others = jnp.concatenate((others, copies), 2)
    x = jnp.concatenate((fuller, others.reshape((outer, -1, *matrix))), 1)
    return jnp.roll(x, first * (each + 1), 1)


def _collect(x: jax.Array, count: int, devices: int, first: int) -> jax.Array:
    """Undo `_deal` of a stack with `count` entries along its second axis."""
    outer, _, *matrix = x.shape
    each, left = divmod(count, devices)
    if not left:
        return x
    x = jnp.roll(x, -first * (each + 1), 1)
    fuller, others = x[:, : left * (each + 1)], x[:, left * (each + 1) :]
    others = others.reshape((outer, devices - left, each + 1, *matrix))[:, :, :each]
    return jnp.concatenate((fuller, others.reshape((outer, -1, *matrix))), 1)


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
