"""The geometry: the manifold of each parameter, matched by key path."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.trees.matching import Matched, match
from manifoldmuon._internal.trees.paths import (
    ByPath,
    Spec,
    flatten_with_path,
    if_complex,
    is_function,
    path_string,
)
from manifoldmuon.manifolds import Entry, LaidOut, Layout, Manifold

_WARNED = 5  # maximum number of parameters listed in a warning
Geometry = Annotated[Spec[Entry | None], lambda name, value: check_geometry_argument(name, value)]
"""A prefix tree of `Manifold`, `LaidOut` and None, a `by_path` object, or a function of path and
leaf. None leaves a parameter to another optimizer; see `hybrid`."""


def resolve_geometry(geometry: Geometry, params: Any) -> Any:
    """Return the manifold of every parameter, as a tree of the parameters' structure.

    Nothing is guessed from a shape: an entry, a pattern or the function must name every parameter.
    All functions that take a geometry raise the same errors; transformations raise them on use.

    Args:
      geometry: the manifold of each parameter, in one of three forms:

        * a prefix tree of `Manifold` (or `LaidOut`, for another layout) over `params`, compared by
          path, so nested dictionaries describe any container;
        * the result of `by_path`;
        * a function `(path, leaf) -> Manifold` of the JAX key path (`jax.tree_util.keystr` turns
          it into text) and a `jax.ShapeDtypeStruct`.

        Paths leave out boxes, nodes with the attribute `value` as their only child, such as
        `nnx.Variable`: a boxed parameter has the same path as a bare parameter.

        The entry None leaves a parameter, of any shape and dtype, to another optimizer. Functions
        of whole trees (`resolve_geometry`, `tabulate`, `project_tree`, ...) do not change it;
        optimizers take an option `rest`, transformations refuse it unless wrapped in `hybrid`.
      params: the parameters: arrays or `jax.ShapeDtypeStruct`, in any registered pytree. `None`
        and `optax.MaskedNode` pass through.

    Returns:
      A tree with a `Manifold`, `LaidOut` or None in place of every parameter.

    Raises:
      TypeError: an entry is neither a `Manifold` (or `LaidOut`) nor None, or a parameter with a
        manifold is not an array of real floating point numbers of 16 bits or more.
      ValueError: a parameter has no entry, an entry no parameter, or a shape does not fit its
        manifold. Every message names the path.

    Examples:
      >>> sphere = mm.manifolds.Hypersphere()
      >>> resolve_geometry({"a": sphere}, {"a": {"w": jnp.ones(3)}}) == {"a": {"w": sphere}}
      True
    """
    matched = match_geometry(geometry, params)
    return matched.fill(params, {i: matched.values[i] for i in matched.real})


def match_geometry(geometry: Geometry, params: Any) -> Matched:
    """Return `match` for a geometry, with manifolds, dtypes and shapes checked."""
    return match(geometry, params, _check_manifold, "geometry")


def warn_of_copies(matched: Matched, params: Any) -> None:
    """Warn of leading axes that a geometry takes for copies and does not declare."""
    leaves, stacks = matched.leaves(params), []
    for i in matched.real:
        entry, shape = matched.values[i], jnp.shape(leaves[i])
        if entry is None or entry.ndim < 2:
            continue
        before = len(shape) - entry.ndim
        if (copies := math.prod(shape[:before])) > 1:
            point = " x ".join(map(str, shape[before:]))
            stacks.append(f"{matched.paths[i]!r} {shape} as {copies} of {point}")
    if stacks:
        _warn_once(tuple(stacks))


@functools.lru_cache(maxsize=512)
def _warn_once(stacks: tuple[str, ...]) -> None:
    """Warn once in a process: the transformations of a chain find the same copies."""
    texts = [
        *stacks[:_WARNED],
        *([f"{len(stacks) - _WARNED} more"] if len(stacks) > _WARNED else []),
    ]
    warnings.warn(
        f"the geometry takes leading axes for independent copies: {', '.join(texts)}."
        " If they are copies, such as scanned layers or experts, declare them: manifold.stacked()."
        " If not, name the axes of fan-in and fan-out: manifold.with_axes(in_axes, out_axes), or"
        " let manifoldmuon.frameworks.nnx.geometry (or linen, equinox) read the model.",
        stacklevel=6,
    )


def check_geometry_argument(name: str, geometry: Any) -> None:
    """Raise `TypeError` unless an argument is a geometry, checked without parameters."""
    if is_function(geometry):
        return
    entries = [(path_string(path), entry) for path, entry in flatten_with_path(geometry)[0]]
    if isinstance(geometry, ByPath):
        entries = [(str(pattern), entry) for pattern, entry in geometry.rules]
    if geometry is None or (entries and entries[0][0] == "" and not isinstance(geometry, Entry)):
        hint = "; write it with parentheses" if callable(geometry) else ""
        raise TypeError(
            f"{name} must be a Manifold, a tree of them, by_path(...) or a function; got"
            f" {shown(geometry)}{hint}"
        )
    for path, entry in entries:
        _check_entry(path, entry)


def _check_entry(path: str, entry: Any) -> None:
    if not isinstance(entry, Entry | None):
        hint = "; write an instance, with parentheses" if isinstance(entry, type) else ""
        if isinstance(entry, Layout):
            hint = "; write Manifold.with_axes(...) for a manifold in another layout"
        raise TypeError(f"the geometry of {path!r} is {shown(entry)}, not a Manifold{hint}.")


def _check_manifold(path: str, entry: Any, leaf: jax.ShapeDtypeStruct) -> None:
    _check_entry(path, entry)
    if entry is None:
        return
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"the parameter {path!r} has dtype {leaf.dtype}; only real floating point"
            " parameters live on a manifold. Leave it to another optimizer (None, and rest=...)"
            f" or take it out with optax.masked{if_complex(leaf.dtype)}."
        )
    if jnp.finfo(leaf.dtype).bits < 16:
        raise TypeError(
            f"the parameter {path!r} has dtype {leaf.dtype}; steps need bfloat16 or wider. Store"
            " the parameter in a wider dtype, and cast where it is used."
        )
    try:
        entry.check_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(f"the parameter {path!r}: {error}") from error


def refuse_keys(matched: Matched, params: Any) -> None:
    """Raise `TypeError` for typed random keys among the parameters: Optax cannot update them."""
    leaves = matched.leaves(params)
    keys = [
        matched.paths[i]
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    if keys:
        raise TypeError(
            f"{keys} are random keys, and Optax cannot update them: take them out of the parameters"
            " (equinox.filter, or nnx.state(model, nnx.Param)), or put None in their place."
        )


def map_geometry(function: Callable[[Manifold], Manifold], geometry: Geometry) -> Geometry:
    """Apply a function to every manifold of a geometry."""

    def mapped(entry: Any) -> Any:
        if isinstance(entry, LaidOut):
            return dataclasses.replace(entry, manifold=function(entry.manifold))
        return function(entry) if isinstance(entry, Manifold) else entry

    if isinstance(geometry, ByPath):
        return ByPath(tuple((pattern, mapped(value)) for pattern, value in geometry.rules))
    if is_function(geometry):
        return lambda path, leaf: mapped(geometry(path, leaf))
    return jax.tree.map(mapped, geometry)


constrained = operator.attrgetter("constrained")
"""Return whether a manifold is constrained, as a function for `map_leaves(select=...)`."""
