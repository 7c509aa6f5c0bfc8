"""Summary table of parameters, manifolds and budgets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import optax

from manifoldmuon import linalg
from manifoldmuon._internal.text import Printed, align
from manifoldmuon._internal.trees.paths import refuse_unused
from manifoldmuon._internal.values import changed_fields
from manifoldmuon.manifolds import Layout, Manifold
from manifoldmuon.norms import ConvRMSToRMS, MaxRowNorm
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._plan import make_plan


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A parameter with its manifold, budget and layout.

    Fields from `copies` on are None if another optimizer has the parameter.

    Attributes:
      path: key path as text.
      shape: shape of the parameter, in its own layout.
      copies: number of points in the parameter: stacked layers, heads, blocks, taps.
      fan_in: fan-in of a point, including taps inside the point; None for vectors. For a table of
        row vectors it is the number of rows.
      fan_out: fan-out of a point; None for vectors.
      manifold: manifold of each point, in its own layout.
      budget: share of the learning rate: a number, or an array over the stack.
      layout: `Layout` of the parameter; None if its axes are in the manifold's order.
    """

    path: str
    shape: tuple[int, ...]
    copies: int | None
    fan_in: int | None
    fan_out: int | None
    manifold: Manifold | None
    budget: Any
    layout: Layout | None

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of the table's columns."""
        manifold, budget = self.manifold, self.budget
        if manifold is None:
            return (self.path, str(self.shape), "-", "-", "-", "rest", "-", "-", "-")
        retraction = getattr(manifold, "retraction", None)
        how = "addition" if not manifold.constrained else brief(retraction) if retraction else "-"
        return (
            self.path,
            str(self.shape),
            str(self.copies),
            str(self.fan_in or "-"),
            str(self.fan_out or "-"),
            brief(manifold, without=("retraction", "step_norm")),
            brief(manifold.norm),
            f"{float(budget):g}" if jnp.ndim(budget) == 0 else f"array{jnp.shape(budget)}",
            how,
        )


@dataclasses.dataclass(frozen=True)
class Table(Printed):
    """Result of `tabulate`; `print` and notebooks show it as text.

    Attributes:
      rows: a `TableRow` per parameter, in the order of the tree.
    """

    rows: tuple[TableRow, ...]

    def __str__(self) -> str:
        rows = [_COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return align([_COLUMNS, tuple("-" * width for width in widths), *rows[1:]])


_COLUMNS = (
    "path", "shape", "copies", "fan-in", "fan-out", "manifold", "norm", "budget", "retraction",
)  # fmt: skip


def tabulate(geometry: Geometry, params: Any, budgets: Budgets = 1.0) -> Table:
    """Return a table of path, shape, fans, manifold, norm, budget and retraction.

    Print it before training.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: arrays or `jax.ShapeDtypeStruct` (such as `jax.eval_shape(model.init, key, x)`), in
        any registered pytree. `None` and `optax.MaskedNode` are not listed.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.

    Returns:
      A `Table` with a `TableRow` per parameter. One with the entry None is shown as `rest`.

    Examples:
      >>> table = tabulate(mm.manifolds.Stiefel().stacked(), {"w": jnp.ones((5, 4, 3))})
      >>> table.rows[0].copies, table.rows[0].fan_in
      (5, 3)
    """
    plan = make_plan(geometry, params, rest=True)
    refuse_unused("budgets", budgets, params)
    own = plan.fill(params, dict.fromkeys(plan.rest, optax.MaskedNode()))  # as `hybrid` does
    leaves, shares = plan.leaves(params), find_budgets(budgets, own).values
    rows = {
        i: [TableRow(plan.paths[i], tuple(jnp.shape(leaves[i])), *[None] * 6)] for i in plan.rest
    }
    for weight in plan.weights:
        i, manifold, leaf = weight.index, weight.manifold, leaves[weight.index]
        point: Any = weight.shape(leaf)[len(weight.copies(leaf)) :]
        fan_in = fan_out = None
        if isinstance(manifold.norm, MaxRowNorm):
            fan_in, fan_out = point
        elif len(point) == 2 or isinstance(manifold.norm, ConvRMSToRMS):
            *taps, fan_out, last = point
            fan_in = last * math.prod(taps)
        fans = math.prod(weight.copies(leaf)), fan_in, fan_out, manifold
        layout = getattr(plan.values[i], "layout", None)
        shape = tuple(jnp.shape(weight.of(leaf)))
        row = TableRow(weight.path, shape, *fans, weight.of(shares[i]), layout)
        rows.setdefault(i, []).append(row)
    return Table(tuple(row for i in sorted(rows) for row in rows[i]))


def brief(value: Any, without: tuple[str, ...] = ()) -> str:
    """Return a frozen value as text, without fields at their defaults."""
    for name in ("TRAINING_MSIGN", "BOUNDED_MSIGN"):
        if value == getattr(linalg, name):
            return name
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = changed_fields(value).items()
    shown = [f"{name}={brief(held)}" for name, held in fields if name not in without]
    return f"{type(value).__name__}({', '.join(shown)})" if shown else type(value).__name__
