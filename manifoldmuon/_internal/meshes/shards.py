"""Stacks of matrices divided over the devices of a mesh: each device solves its own share.

The compiler alone either divides each matrix, so that every product of an iteration communicates,
or divides nothing, so that every device does all the work.
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

# Divide the products of matrices with this many entries or more; for smaller matrices the gathers
# cost about as much as the products. Compiled for TPUs, dividing 24 matrices of 2**24 entries over
# 64 chips moved 78 times as many bytes per step, and a step of 80 matrices of 2**28 entries over
# 256 chips no longer fitted into memory.
_LARGE = 2**30
# Solve matrices singly if they have `_FEW_ENTRIES` entries or more (smaller matrices need a batch)
# and the work of the busiest device falls by more than the factor `_GAIN`: compiled for TPUs,
# solving singly takes 8 to 23 % more cycles for the same matrices.
_FEW_ENTRIES, _GAIN = 2**16, 1.15


class Division(NamedTuple):
    """Axes of a mesh that divide each leading axis of a stack, and rows and columns of matrices."""

    batch: tuple[Axes, ...]
    rows: Axes = ()
    columns: Axes = ()


class Batch(NamedTuple):
    """A stack of independent problems.

    Attributes:
      function: solves problems that are independent along the leading axes, which all arguments
        and results share.
      batch_ndim: number of leading axes, at least 1; the first axis counts leaves.
      arguments: trees of arrays; the first argument is an array of points.
      division: the division of all arguments and results with the shape of the points. None if
        unknown: `_likely` guesses, and a wrong guess costs communication.
    """

    function: Callable[..., Any]
    batch_ndim: int
    arguments: tuple[Any, ...]
    division: Division | None = None


def solve_sharded(mesh: Any, stacks: Sequence[Batch]) -> list[Any]:
    """Return `function(*arguments)` for every stack, divided over the devices of the mesh.

    Mesh axes that divide leading axes of the arguments stay there: the devices that share a part
    of the stack exchange matrices among themselves, in a single all-to-all. If the number of
    matrices in a part is not a multiple of the number of its devices, some devices solve an extra
    matrix.

    If there are too few matrices of `_LARGE` entries or more for all devices, groups of devices
    (which differ along some mesh axes) share the matrices, and each group divides the products.
    """
    plans = _place_leftovers(mesh, [_plan_stack(mesh, stack) for stack in stacks])
    pairs = list(zip(plans, stacks, strict=True))
    given = [plan.send(stack.arguments) for plan, stack in pairs]
    # Every exchange waits for the slowest device. If devices own different numbers of matrices,
    # only their total work is balanced, so solve all stacks between two exchanges.
    wait = any(plan.one_by_one for plan in plans)
    given = jax.lax.optimization_barrier(given) if wait else given
    results = [s.solve(p.function, x) for (s, p), x in zip(pairs, given, strict=True)]
    results = jax.lax.optimization_barrier(results) if wait else results
    return [plan.gather(x) for plan, x in zip(plans, results, strict=True)]


class _Plan(NamedTuple):
    """How the devices of a mesh share a stack of matrices.

    Attributes:
      mesh: the mesh.
      batch: sizes of the leading axes.
      matrix: shape of each matrix.
      held: for each leading axis, the mesh axes that divide it and stay there.
      rows: mesh axes that divide the rows, and the stack of whole matrices.
      columns: mesh axes that divide the columns, and the stack of whole matrices.
      free: mesh axes with unknown use; they divide the stack of whole matrices, too.
      group: mesh axes that divide the products of each matrix.
      first: index of the first device with an extra matrix.
      one_by_one: whether each device solves only its own matrices, singly and without padding.
    """

    mesh: Any
    batch: tuple[int, ...]
    matrix: tuple[int, ...]
    held: tuple[Axes, ...]
    rows: Axes
    columns: Axes
    free: Axes
    group: Axes
    first: int = 0
    one_by_one: bool = False

    @property
    def stay(self) -> Axes:
        return tuple(itertools.chain(*self.held))

    @property
    def exchanged(self) -> Axes:
        return self.rows + self.columns

    @property
    def devices(self) -> int:
        """Return the number of devices that share a part of the stack."""
        return _mesh_size(self.mesh, self.free + self.exchanged)

    @property
    def inner(self) -> int:
        """Return the number of matrices in a part."""
        return math.prod(self.batch) // _mesh_size(self.mesh, self.stay)

    @property
    def extra(self) -> int:
        """Return the number of matrices in a part that remain after equal shares."""
        return self.inner % self.devices

    @property
    def whole(self) -> PartitionSpec:
        """Return the sharding of whole matrices."""
        return PartitionSpec(self.stay or None, self.free + self.exchanged or None)

    def send(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return stacks of shape `(parts, slots, ...)`, of whole matrices."""

        def send(x):
            tail, (cut, order) = x.shape[len(self.batch) :], self._cut()
            x = _pin(self.mesh, x, ()).reshape((*cut, *tail))
            x = x.transpose((*order, *range(len(cut), x.ndim))).reshape((-1, self.inner, *tail))
            x = _assign(x, self.devices, self.first)
            for stage in self._stages():
                x = _pin(self.mesh, x, self.stay, stage)
            return self._exchange(_assemble, x) if self._moves_between_devices(x) else x

        return jax.tree.map(send, arguments)

    def solve(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Apply `function` to each device's matrices."""

        def solve(*given):
            shape = given[0].shape[:2]
            point, *others = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), given)
            # This sharding of the operands minimises recomputation.
            point = _divide_stack(point, self.group, (2, 1))
            others = jax.tree.map(lambda x: _divide_stack(x, self.group, (1, 2)), others)
            if self.one_by_one:
                device = jax.lax.axis_index(self.free + self.exchanged)
                more = (device - self.first) % self.devices < self.extra
                count = self.inner // self.devices + more
                results = _solve_some(function, count, (point, *others))
            else:
                results = function(point, *others)
            results = jax.tree.map(lambda x: _divide_stack(x, self.group, (2, 1)), results)
            return jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), results)

        return self._on_shards(solve, self.whole, self.whole)(*given)

    def gather(self, results: Any) -> Any:
        """Send results back to the positions of the arguments: undo `send`."""

        def gather(x):
            tail, (cut, order) = x.shape[2:], self._cut()
            x = self._exchange(_disperse, x) if self._moves_between_devices(x) else x
            for stage in reversed(self._stages()):
                x = _pin(self.mesh, x, self.stay, stage)
            x = _collect(x, self.inner, self.devices, self.first)
            x = x.reshape((*[cut[i] for i in order], *tail))
            x = x.transpose((*[order.index(i) for i in range(len(cut))], *range(len(cut), x.ndim)))
            return _pin(self.mesh, x.reshape((*self.batch, *tail)), ())

        return jax.tree.map(gather, results)

    def _cut(self) -> tuple[list[int], list[int]]:
        """Return leading axes split into (parts, length), and the order with all parts first."""
        pairs = [
            (n, _mesh_size(self.mesh, axes)) for n, axes in zip(self.batch, self.held, strict=True)
        ]
        cut = [size for n, parts in pairs for size in (parts, n // parts)]
        return cut, [*range(0, len(cut), 2), *range(1, len(cut), 2)]

    def _stages(self) -> list[Axes]:
        """Return the mesh axes that divide the matrices of a part, stage by stage.

        The first stage is undivided: if the sharding of a stack changes together with its shape, or
        if two mesh axes change at once, the compiler gathers the stack.
        """
        return [self.free[:i] for i in range(len(self.free))]

    def _moves_between_devices(self, x: jax.Array) -> bool:
        return bool(self.exchanged) and x.shape[2:] == self.matrix

    def _exchange(self, function: Callable[..., Any], x: jax.Array) -> jax.Array:
        """Apply `_assemble` or `_disperse` to a stack."""
        divided = PartitionSpec(
            self.stay or None, self.free or None, self.rows or None, self.columns or None
        )
        ends = (divided, self.whole) if function is _assemble else (self.whole, divided)
        tiles = _mesh_size(self.mesh, self.rows), _mesh_size(self.mesh, self.columns)
        return self._on_shards(lambda x: function(x, self.exchanged, tiles), *ends)(x)

    def _on_shards(self, function: Callable[..., Any], before: Any, after: Any) -> Any:
        owners = {name for name in self.mesh.axis_names if name not in self.group}
        specs: Any = {"in_specs": before, "out_specs": after, "axis_names": owners}
        if not owners:
            return function
        return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)


def _plan_stack(mesh: Any, stack: Batch) -> _Plan:
    """Plan how to divide a stack, without extra matrices."""
    point, ndim = stack.arguments[0], stack.batch_ndim
    batch, matrix = point.shape[:ndim], point.shape[ndim:]
    count = math.prod(batch)
    large = point.size // count >= _LARGE
    owners = _owning_axes(dict(mesh.shape), count) if large else mesh.axis_names
    group = tuple(name for name in mesh.axis_names if name not in owners)
    held, rows, columns = stack.division or _likely(mesh, owners, batch)
    *held, rows, columns = (
        tuple(name for name in axes if name in owners) for axes in (*held, rows, columns)
    )
    # Matrices leave the free mesh axes in turn, from the last to the first: if several mesh axes
    # divide an axis of an array, only the last of them can leave.
    taken = (*itertools.chain(*held), *rows, *columns)
    free = tuple(name for name in reversed(owners) if name not in taken)
    return _Plan(mesh, batch, matrix, tuple(held), rows, columns, free, group)


def _place_leftovers(mesh: Any, plans: list[_Plan]) -> list[_Plan]:
    """Choose which devices get an extra matrix, and which stacks devices solve singly.

    Extra matrices go to consecutive devices (cyclically), the neighbours with the least work; the
    most expensive kind chooses first. Devices solve matrices singly if that spares the busiest
    device enough work, compared with padding every share to the same size.
    """
    costs = []
    for plan in plans:
        m, n = max(plan.matrix[-2:]), min(plan.matrix[-2:])
        # Multiplications of `muon`: a Gram matrix, four quintic steps of its size, and a product.
        costs.append((2.0 * m * n**2 + 12.0 * n**3) / _mesh_size(mesh, plan.group))
    grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    work, filled, firsts = np.zeros(mesh.size), 0.0, [0] * len(plans)
    for i in sorted(range(len(plans)), key=lambda i: -costs[i]):
        devices, extra = plans[i].devices, plans[i].extra
        # Each kind counts devices in its own order, the same for all parts of its stack.
        axes = [mesh.axis_names.index(name) for name in plans[i].free + plans[i].exchanged]
        owners = np.moveaxis(grid, axes, range(len(axes))).reshape((devices, -1))
        load = work[owners].sum(1)
        before = np.cumsum([0, *load, *load])
        firsts[i] = int(np.argmin(before[extra : extra + devices] - before[:devices]))
        work[owners[(firsts[i] + np.arange(extra)) % devices]] += costs[i]
        each = plans[i].inner // devices
        work += each * costs[i]
        filled += (each + (extra > 0)) * costs[i]
    pays, placed = filled > _GAIN * work.max(), []
    for plan, first in zip(plans, firsts, strict=True):
        large = math.prod(plan.matrix) >= _FEW_ENTRIES and not plan.group
        placed.append(plan._replace(first=first, one_by_one=bool(pays and large and plan.extra)))
    return placed


def _solve_some(function: Callable[..., Any], count: Any, arguments: tuple[Any, ...]) -> Any:
    """Apply `function` to the first `count` problems, in turn; return zeros for the rest."""
    one = jax.tree.map(lambda x: x[:1], arguments)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *one))

    def solve(slot):
        index, given = slot
        given = jax.tree.map(lambda x: x[None], given)
        with jax.named_scope("own_matrix"):  # shows in profiles
            return jax.lax.cond(index < count, function, lambda *_: nothing, *given)

    indices = jnp.arange(arguments[0].shape[0])
    return jax.tree.map(lambda x: x[:, 0], jax.lax.map(solve, (indices, arguments)))


def _assign(x: jax.Array, devices: int, first: int) -> jax.Array:
    """Return a stack with the same number of slots along its second axis for each device.

    Devices from `first` on get an extra matrix each until none is left. The other devices get a
    copy of the first matrix as padding: zeros are far from most sets and take longest to solve.
    """
    outer, count, *matrix = x.shape
    each, extra = divmod(count, devices)
    if not extra:
        return x
    fuller, others = x[:, : extra * (each + 1)], x[:, extra * (each + 1) :]
    others = others.reshape((outer, devices - extra, each, *matrix))
    copies = jnp.broadcast_to(x[:, None, :1], (outer, devices - extra, 1, *matrix))
    others = jnp.concatenate((others, copies), 2)
    x = jnp.concatenate((fuller, others.reshape((outer, -1, *matrix))), 1)
    return jnp.roll(x, first * (each + 1), 1)


def _collect(x: jax.Array, count: int, devices: int, first: int) -> jax.Array:
    """Undo `_assign` of a stack with `count` entries along its second axis."""
    outer, _, *matrix = x.shape
    each, extra = divmod(count, devices)
    if not extra:
        return x
    x = jnp.roll(x, -first * (each + 1), 1)
    fuller, others = x[:, : extra * (each + 1)], x[:, extra * (each + 1) :]
    others = others.reshape((outer, devices - extra, each + 1, *matrix))[:, :, :each]
    return jnp.concatenate((fuller, others.reshape((outer, -1, *matrix))), 1)


def _likely(mesh: Any, owners: Axes, batch: tuple[int, ...]) -> Division:
    """Guess how automatic axes, which cannot be inspected, divide a stack.

    The first mesh axis with several devices is assumed to hold the last leading axis (not the axis
    of leaves) with a divisible size, as for experts. If two mesh axes divide the matrices instead,
    the matrices move twice.
    """
    first = tuple(name for name in owners if mesh.shape[name] > 1)[:1]
    fits = [k for k in range(1, len(batch)) if batch[k] % _mesh_size(mesh, first) == 0]
    return Division(tuple(first if k in fits[-1:] else () for k in range(len(batch))))


def _assemble(x: jax.Array, axes: Axes, tiles: tuple[int, int]) -> jax.Array:
    """Exchange a tile of every matrix for whole matrices, a share of the second axis."""
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
    """Constrain the leading axes; leave the rest to the compiler."""
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    spec = PartitionSpec(*[names or None for names in axes], *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _mesh_size(mesh: Any, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _owning_axes(sizes: dict[str, int], count: int) -> tuple[str, ...]:
    """Return the axes with the most devices such that `count` problems keep half or more busy."""
    some = [s for k in range(len(sizes) + 1) for s in itertools.combinations(sizes, k)]
    owners = {axes: math.prod(sizes[name] for name in axes) for axes in some}
    busy = [axes for axes, n in owners.items() if 2 * count >= -(-count // n) * n]
    return max(busy, key=lambda axes: owners[axes])


def _divide_stack(x: jax.Array, names: tuple[str, ...], axes: tuple[int, ...]) -> jax.Array:
    """Divide the stack over these mesh axes, along the first of `axes` with a divisible size."""
    if not names:
        return x
    mesh = jax.sharding.get_abstract_mesh()
    size = _mesh_size(mesh, names)
    first = next((i for i in axes if i < x.ndim and x.shape[i] % size == 0), None)
    spec = PartitionSpec(*(names if i == first else None for i in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
