"""Guesses, from names and neighbouring shapes, at mistakes in a geometry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.norms import MaxRowNorm, Spectral
from manifoldmuon.optim import Geometry, tabulate


def lint(geometry: Geometry, params: Any) -> list[str]:
    """Return sentences about what looks wrong in a geometry, each beginning with a path.

    They are guesses, from names and from the shapes beside a parameter:

    * a table of embeddings on a Stiefel manifold or under a spectral norm;
    * a batch axis taken for fan-in or fan-out (or a fan-in taken for a batch axis): a matrix in the
      middle of an axis that is longer than both its sides, or whose fan-out is not its bias's;
    * stacked layers seen as one matrix;
    * a matrix under the norm of vectors, because none was chosen for it.

    Args:
      geometry: which manifold each parameter lives on; see `optim.resolve`. Of parameters whose
        entry is None nothing is said.
      params: arrays or `jax.ShapeDtypeStruct`, in any registered pytree.

    Returns:
      One sentence for each suspicion; an empty list where there is none.

    Examples:
      >>> lint(mm.manifolds.Stiefel(), {"embedding": jnp.ones((8, 4))})[0][:41]
      'embedding: looks like a table of embeddin'
    """
    every = tabulate(geometry, params).rows
    shapes = {row.path: row.shape for row in every}
    rows = [row for row in every if row.manifold is not None]
    stacks, bare = _find_stacks(shapes), _find_bare_stacks(shapes)
    found = []
    for row in rows:
        stack, bias = stacks.get(row.path), _bias(row.path, shapes)
        if stack is None and _kind_of_first(row):
            stack = bare.get(row.path)
        if bias and _kind_of_first(row) == "in" and math.prod(bias) == row.fan_out:
            stack = None  # the bias of a stack has an axis more
        found += [f"{row.path}: {x}" for x in _warnings(row, stack, bias)]
    return found


def _warnings(row: Any, stack: int | None, bias: tuple[int, ...] | None) -> Iterator[str]:
    manifold, norm = row.manifold, row.manifold.norm
    leading = _leading_axes(row)
    blocks = 1 if row.layout is None else row.layout.out_blocks
    inside = bool(row.shape) and 0 not in leading
    orthonormal = isinstance(manifold, Stiefel)
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
            f" {axes[_kind_of_first(row)]}, so that the stack is seen as one matrix."
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
        elif (
            bias is not None
            and math.prod(bias) in _products(row.shape)  # else no choice of axes would fit
            and not any(
                _fits(bias, [*(row.shape[i] for i in leading), blocks], fan_out)
                for fan_out in _fan_outs(row)
            )
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
            f"looks like a matrix, but {type(norm).__name__} takes each of its"
            f" {math.prod(row.shape[: len(row.shape) - norm.ndim])} rows for a weight by itself."
            " Choose a norm: Euclidean(RMSToRMS()), or Euclidean(L1ToRMS()) for a table."
        )
    if norm.ndim == 1 and _is_vector(row.path) and row.shape[-2:] == (1, 1) and row.copies > 1:
        yield (
            f"looks like one vector, but {type(norm).__name__} takes each of its {row.copies}"
            " entries for a weight by itself. Count its axes:"
            f" Euclidean(Frobenius(ndim={len(row.shape)}))."
        )


def _leading_axes(row: Any) -> list[int]:
    """Return the axes, counted from the front, over which the copies lie."""
    rank = len(row.shape)
    if row.layout is None:
        return list(range(rank - row.manifold.ndim))
    named = {axis % rank for kind in _KINDS for axis in _axes(getattr(row.layout, kind))}
    return [axis for axis in range(rank) if axis not in named]


def _fan_outs(row: Any) -> list[int]:
    """Return the fan-out, and without axes that a bias lacks: taps of a transposed convolution."""
    if row.layout is None or row.layout.out_blocks > 1:
        return [row.fan_out]
    sizes = [row.shape[axis] for axis in _axes(row.layout.out_axes)]
    return [math.prod(sizes[n:]) for n in range(len(sizes))]


def _kind_of_first(row: Any) -> str:
    """Return whether the first axis is part of the fan `in` or `out`, or empty text."""
    if row.layout is None:
        return "out" if row.manifold.ndim == 2 else ""
    first = -len(row.shape)
    kinds = [kind for kind in _KINDS[:2] if first in _axes(getattr(row.layout, kind))]
    return kinds[0].removesuffix("_axes") if kinds else ""


_KINDS = ("in_axes", "out_axes", "taps")


def _axes(numbers: int | tuple[int, ...]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else numbers


def _find_stacks(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the parameters that look like stacked layers, by path, and how many layers.

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
    """Return the parameters that look like stacked layers without biases or gains, by path.

    All of a module have three axes or more, the first of one length, which is shorter than all
    others; and those others tell layers of several kinds, or square ones, from a fan that several
    layers share, such as that of fused heads. The taps of a convolution look the same, and
    are recognised by the name.
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
    """Return the parameters of every subtree, by its path."""
    members: dict[str, list[str]] = {}
    for path in shapes:
        parts = path.split("/")
        for n in range(len(parts)):
            members.setdefault("/".join(parts[:n]), []).append(path)
    return members


def _bias(path: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of the bias of the same layer."""
    parent = path.rpartition("/")[0]
    names = (f"{parent}/{name}" if parent else name for name in ("bias", "b"))
    return next((shapes[name] for name in names if name in shapes and name != path), None)


def _products(shape: tuple[int, ...]) -> set[int]:
    """Return the products of some of the lengths: what fan-outs there are to choose from."""
    found = {1}
    for length in shape:
        found |= {length * product for product in found}
    return found


def _fits(bias: tuple[int, ...], leading: list[int], fan_out: int) -> bool:
    """Return whether a bias is a vector of the fan-out, or one for each copy or block."""
    sizes = [fan_out * math.prod(leading[:n]) for n in range(len(leading) + 1)]
    return math.prod(bias) in sizes


def _is_table(path: str) -> bool:
    """Return whether a path names a table; a patch embedding is a linear map."""
    return any(word in path.lower() for word in _TABLES) and "patch" not in path.lower()


_TABLES = ("embed", "wte", "wpe", "vocab", "lookup")


def _is_vector(path: str) -> bool:
    """Return whether a path names a bias, a gain or a parameter of a normalisation."""
    parts = path.lower().split("/")
    return parts[-1] in _VECTORS or any("norm" in part for part in parts[-2:])


_VECTORS = ("bias", "b", "scale", "offset", "gain", "gains", "gamma", "beta", "shift")
