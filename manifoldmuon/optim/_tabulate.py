"""Summary table of parameters, manifolds and budgets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from manifoldmuon import linalg
from manifoldmuon.manifolds import LaidOut, Layout, Manifold, Orthogonal, Stiefel
from manifoldmuon.manifolds.solvers import ByPlatform
from manifoldmuon.norms import ConvRMSToRMS, MaxRowNorm, Spectral
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._geometry import Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._trees import far_distances


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One parameter and what was chosen for it.

    Attributes:
      path: see `path_string`.
      shape: of the parameter, in its own layout.
      copies: how many points of the manifold it holds: stacked layers, heads, blocks, taps.
      fan_in: of one point; taps that are part of the point count. None for vectors. A table of
        vectors, one per row, has its rows as fan-in.
      fan_out: of one point.
      manifold: where each point lives, in the manifold's own layout.
      budget: its share of the learning rate: a number, or an array over the stack.
      layout: which axes of the parameter are whose; None where they are in the manifold's order.
      warnings: sentences about what looks wrong.
    """

    path: str
    shape: tuple[int, ...]
    copies: int
    fan_in: int | None
    fan_out: int | None
    manifold: Manifold
    budget: Any
    layout: Layout | None = None
    warnings: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of the table's columns."""
        manifold, budget = self.manifold, self.budget
        retraction = getattr(manifold, "retraction", None)
        how = "addition" if not manifold.constrained else brief(retraction) if retraction else "-"
        return (
            self.path,
            str(self.shape),
            str(self.copies),
            "-" if self.fan_in is None else str(self.fan_in),
            "-" if self.fan_out is None else str(self.fan_out),
            brief(manifold, without=("retraction", "step_norm")),
            brief(manifold.norm),
            f"{float(budget):g}" if jnp.ndim(budget) == 0 else f"array{jnp.shape(budget)}",
            how,
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """Result of `tabulate`; `print` shows it as text, with the warnings below.

    Attributes:
      rows: one for each parameter, in the order of the tree.
    """

    rows: tuple[TableRow, ...]

    @property
    def warnings(self) -> list[str]:
        """Warnings, one sentence each, beginning with the path."""
        return [f"{row.path}: {warning}" for row in self.rows for warning in row.warnings]

    def __str__(self) -> str:
        lines = [_COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for line in lines:
            cells = zip(line, widths, _COLUMNS, strict=True)
            padded = [c.rjust(w) if name in _NUMBERS else c.ljust(w) for c, w, name in cells]
            text.append("  ".join(padded).rstrip())
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*text, *(f"! {warning}" for warning in self.warnings)])


_COLUMNS = (
    "path", "shape", "copies", "fan-in", "fan-out", "manifold", "norm", "budget", "retraction",
)  # fmt: skip
_NUMBERS = ("copies", "fan-in", "fan-out", "budget")


def tabulate(geometry: Geometry, params: Any, budgets: Budgets = 1.0) -> Table:
    """Return a table of path, shape, fans, manifold, norm, budget and retraction.

    Print it before training. Nothing is decided by it: the warnings are guesses, from names and
    from the shapes beside a parameter, at what a geometry may have got wrong:

    * a table of embeddings on a Stiefel manifold or under a spectral norm;
    * a batch axis taken for fan-in or fan-out (or a fan-in taken for a batch axis): a matrix in the
      middle of an axis that is longer than both its sides, or whose fan-out is not its bias's;
    * stacked layers seen as one matrix;
    * a matrix under the norm of vectors, because none was chosen for it;
    * weights at a `Manifold.distance` above 0.1, under the conditions of `retract`.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      params: arrays or `jax.ShapeDtypeStruct` (such as `jax.eval_shape(model.init, key, x)`), in
        any registered pytree. Places that hold no parameter are not listed.
      budgets: what `scale_by_budget` is given.

    Returns:
      A `Table`: `print(table)`, or `assert not table.warnings`.

    Raises:
      TypeError: see `resolve` and `scale_by_budget`.
      ValueError: see `resolve` and `scale_by_budget`.

    Example:
      `print(tabulate(net.geometry(), params, net.budgets()))`
    """
    places, shares = find_manifolds(geometry, params), find_budgets(budgets, params)
    leaves = places.leaves(params)
    entries = {places.paths[i]: places.values[i] for i in places.real}
    shapes = {places.paths[i]: tuple(jnp.shape(leaves[i])) for i in places.real}
    stacks, bare = _find_stacks(shapes), _find_bare_stacks(shapes)
    far = far_distances(geometry, params)
    rows = []
    for place in places.real:
        path = places.paths[place]
        entry = entries[path]
        row = _row(path, entry, shapes[path], shares.values[place])
        stack = stacks.get(path)
        if stack is None and _kind_of_first(entry, row.shape):
            stack = bare.get(path)
        found = [*_warnings(row, entry, stack, _bias(path, shapes))]
        if path in far:
            found.append(
                f"distance {far[path]:.2g} from its manifold; start from"
                " optim.project_tree(geometry, params)"
            )
        rows.append(dataclasses.replace(row, warnings=tuple(found)))
    return Table(tuple(rows))


def _row(path: str, entry: Any, shape: tuple[int, ...], budget: Any) -> TableRow:
    manifold = manifold_of(entry)
    inner = inner_shape(entry, shape)
    leading, point = inner[: len(inner) - manifold.ndim], inner[len(inner) - manifold.ndim :]
    fan_in = fan_out = None
    if isinstance(manifold.norm, MaxRowNorm):
        fan_in, fan_out = point
    elif len(point) == 2 or isinstance(manifold.norm, ConvRMSToRMS):
        *taps, fan_out, last = point
        fan_in = last * math.prod(taps)
    layout = entry.layout if isinstance(entry, LaidOut) else None
    return TableRow(path, shape, math.prod(leading), fan_in, fan_out, manifold, budget, layout)


def _warnings(
    row: TableRow, entry: Any, stack: int | None, bias: tuple[int, ...] | None
) -> Iterator[str]:
    manifold, norm = row.manifold, row.manifold.norm
    leading = _leading_axes(entry, row.shape)
    blocks = entry.layout.out_blocks if isinstance(entry, LaidOut) else 1
    inside = bool(row.shape) and 0 not in leading
    orthonormal = isinstance(manifold, Stiefel | Orthogonal)
    if _is_table(row.path) and (orthonormal or isinstance(norm, Spectral)):
        where = type(manifold).__name__ if orthonormal else "flat space with a spectral norm"
        yield (
            f"looks like a table of embeddings, on {where}, which ties its rows to one another."
            " Use EmbeddingRows() or Euclidean(L1ToRMS())."
        )
    if stack is not None and inside:
        axes = {"in": "the fan-in", "out": "the fan-out", "": "the weight"}
        yield (
            f"axis 0 looks like a stack of {stack} layers, but it is counted into"
            f" {axes[_kind_of_first(entry, row.shape)]}, so that the stack is seen as one matrix."
            " Leave it out of the manifold's axes."
        )
    elif row.fan_in is not None and row.fan_out is not None and not isinstance(norm, MaxRowNorm):
        longest = max((row.shape[axis] for axis in leading), default=0)
        if longest > max(row.fan_in, row.fan_out):
            yield (
                f"{row.copies} copies of a matrix of fan-in {row.fan_in} and fan-out"
                f" {row.fan_out}: the axis of length {longest} looks like a fan that was taken for"
                " a batch axis, and a batch axis taken for a fan. Name the axes: with_axes(...)."
            )
        elif bias is not None and not _fits(
            bias, [*(row.shape[i] for i in leading), blocks], row.fan_out
        ):
            yield (
                f"the fan-out is {row.fan_out}, but the bias beside it has shape {bias}: fan-in"
                " and fan-out may have changed places, or a batch axis was taken for one of them."
                " Name the axes: transposed() or with_axes(...)."
            )
    if (
        not manifold.constrained
        and norm.ndim < 2
        and len(row.shape) > 1
        and not _is_vector(row.path)
        and not (stack is not None and len(row.shape) == 2)
    ):
        yield (
            f"looks like a matrix, but {brief(norm)} takes each of its"
            f" {math.prod(row.shape[: len(row.shape) - norm.ndim])} rows for a weight by itself."
            " Choose a norm: Euclidean(RMSToRMS()), or Euclidean(L1ToRMS()) for a table."
        )
    if norm.ndim == 1 and _is_vector(row.path) and row.shape[-2:] == (1, 1) and row.copies > 1:
        yield (
            f"looks like one vector, but {brief(norm)} takes each of its {row.copies} entries for a"
            f" weight by itself. Count its axes: Euclidean(Frobenius(ndim={len(row.shape)}))."
        )


def _leading_axes(entry: Any, shape: tuple[int, ...]) -> list[int]:
    """The axes, counted from the front, over which the copies lie."""
    if not isinstance(entry, LaidOut):
        return list(range(len(shape) - entry.ndim))
    layout = entry.layout
    named = {axis % len(shape) for kind in _KINDS for axis in _axes(getattr(layout, kind))}
    return [axis for axis in range(len(shape)) if axis not in named]


def _kind_of_first(entry: Any, shape: tuple[int, ...]) -> str:
    if isinstance(entry, LaidOut):
        first = -len(shape)
        kinds = [kind for kind in _KINDS if first in _axes(getattr(entry.layout, kind))]
        return kinds[0].removesuffix("_axes") if kinds and kinds[0] != "taps" else ""
    return "out" if entry.ndim == 2 else ""


_KINDS = ("in_axes", "out_axes", "taps")


def _axes(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _find_stacks(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The parameters that look like stacked layers, by path, and how many layers.

    All parameters of a scanned module begin with the same axis, its biases and gains included,
    which then have two axes or more, not counting those of length 1 for the places of an image.
    """
    found = {}
    for paths in _by_module(shapes).values():
        lengths = {shapes[p][0] if math.prod(shapes[p][1:]) != 1 else None for p in paths}
        alike = len(lengths) == 1 and None not in lengths and len(paths) > 1
        if alike and any(_is_vector(path) for path in paths):
            found.update(dict.fromkeys(paths, lengths.pop()))
    return found


def _find_bare_stacks(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The parameters that look like stacked layers without biases or gains, by path.

    All of a module have three axes or more, the first of one length, which is shorter than all
    others; and those others tell layers of several kinds, or square ones, from a fan that several
    layers share, such as that of fused heads. The taps of a convolution look the same: it is told
    by its name.
    """
    found = {}
    for paths in _by_module(shapes).values():
        if len(paths) < 2 or any("conv" in path.lower() for path in paths):
            continue
        rests = {shapes[path][1:] for path in paths}
        firsts = {shapes[path][:1] for path in paths}
        if len(firsts) > 1 or any(len(rest) < 2 for rest in rests):
            continue
        (length,) = firsts.pop()
        square = all(len(set(rest)) == 1 for rest in rests)
        if length < min(map(min, rests)) and (len(rests) > 1 or square):
            found.update(dict.fromkeys(paths, length))
    return found


def _by_module(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The parameters of every subtree, by its path."""
    members: dict[str, list[str]] = {}
    for path in shapes:
        parts = path.split("/")
        for n in range(len(parts)):
            members.setdefault("/".join(parts[:n]), []).append(path)
    return members


def _bias(path: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the bias of the same layer."""
    parent = path.rpartition("/")[0]
    names = (f"{parent}/{name}" if parent else name for name in ("bias", "b"))
    return next((shapes[name] for name in names if name in shapes and name != path), None)


def _fits(bias: tuple[int, ...], leading: list[int], fan_out: int) -> bool:
    """Return whether a bias is a vector of the fan-out, or one for each copy or block."""
    sizes = [fan_out * math.prod(leading[:n]) for n in range(len(leading) + 1)]
    return math.prod(bias) in sizes


def _is_table(path: str) -> bool:
    """By its name. A patch embedding is a linear map."""
    return any(word in path.lower() for word in _TABLES) and "patch" not in path.lower()


_TABLES = ("embed", "wte", "wpe", "vocab", "lookup")


def _is_vector(path: str) -> bool:
    """By its name: a bias or a gain, or a parameter of a normalisation."""
    parts = path.lower().split("/")
    return parts[-1] in _VECTORS or any("norm" in part for part in parts[-2:])


_VECTORS = ("bias", "b", "scale", "offset", "gain", "gains", "gamma", "beta", "shift")


def brief(value: Any, without: tuple[str, ...] = ()) -> str:
    """A frozen value as text: its fields that are not at their defaults."""
    if isinstance(value, ByPlatform):  # the presets; the other solver has fewer passes
        return brief(value.cpu)
    for name in ("TRAINING_MSIGN", "BOUNDED_MSIGN"):
        if value == getattr(linalg, name):
            return name
    if not dataclasses.is_dataclass(value):
        return repr(value)
    shown = []
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if field.init and field.repr and field.name not in without and held != field.default:
            shown.append(f"{field.name}={brief(held)}")
    return f"{type(value).__name__}({', '.join(shown)})" if shown else type(value).__name__
