"""The geometry: the manifold of each parameter, matched by key path."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.trees.paths import (
    ByPath,
    Spec,
    flatten_with_path,
    if_complex,
    is_function,
    path_string,
)
from manifoldmuon._internal.trees.places import Places, find_places
from manifoldmuon.manifolds import LaidOut, Layout, Manifold

_SHOWN = 5  # maximum number of parameters listed in a warning
Entry = Manifold | LaidOut
Geometry = Spec[Entry | None]
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
    places = find_places(geometry, params, _check_manifold, "geometry")
    return places.fill(params, {i: places.values[i] for i in places.real})


def find_manifolds(
    geometry: Geometry, params: Any, rest: bool = False, cut: bool = True, warn: bool = True
) -> Places:
    """Return `find_places` for a geometry, with manifolds, dtypes and shapes checked.

    Unequal blocks of a parameter become separate leaves, each with its path and entry.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: the parameters.
      rest: whether to allow the entry None; `Places.rest` then lists these parameters.
      cut: False leaves unequal blocks together.
      warn: whether to warn of copies that the geometry does not declare.

    Raises:
      TypeError: see `resolve_geometry`.
      ValueError: an entry is None and `rest` is False; see `resolve_geometry`.
    """
    places = find_places(geometry, params, _check_manifold, "geometry")
    if warn:
        _warn_of_copies(places, params)
    left = tuple([place for place in places.real if places.values[place] is None])
    if not left:
        return cut_places(places) if cut else places
    if not rest:
        raise ValueError(
            f"the geometry leaves {[places.paths[place] for place in left]} to another optimizer"
            " (None): give it, as in manifold_muon(0.02, geometry, rest=optax.adamw(3e-4)), or wrap"
            " a chain of your own in optim.hybrid(tx, geometry, optax.adamw(3e-4))."
        )
    real = tuple([place for place in places.real if places.values[place] is not None])
    places = dataclasses.replace(places, real=real, rest=left)
    return cut_places(places) if cut else places


def _warn_of_copies(places: Places, params: Any) -> None:
    leaves, found = places.leaves(params), []
    for i in places.real:
        entry, shape = places.values[i], jnp.shape(leaves[i])
        if entry is None or entry.ndim < 2:
            continue
        before = len(shape) - entry.ndim
        if (copies := math.prod(shape[:before])) > 1:
            point = " x ".join(map(str, shape[before:]))
            found.append(f"{places.paths[i]!r} {shape} as {copies} of {point}")
    if found:
        _warn_once(tuple(found))


@functools.lru_cache(maxsize=512)
def _warn_once(found: tuple[str, ...]) -> None:
    """Warn once in a process: the transformations of a chain find the same copies."""
    texts = [*found[:_SHOWN], *([f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])]
    warnings.warn(
        f"the geometry takes leading axes for independent copies: {', '.join(texts)}."
        " If they are copies, such as scanned layers or experts, declare them: manifold.stacked()."
        " If not, name the axes of fan-in and fan-out: manifold.with_axes(in_axes, out_axes), or"
        " let manifoldmuon.frameworks.nnx.geometry (or linen, equinox, haiku) read the model.",
        stacklevel=6,
    )


@functools.lru_cache(maxsize=512)
def cut_places(places: Places) -> Places:
    """Split each parameter with unequal blocks into a leaf per block."""
    cuts = tuple([x.layout.cut if isinstance(x, LaidOut) else None for x in places.values])
    if not any(cuts):
        return places
    paths, values, real, rest = [], [], [], []
    for i, (path, entry, cut) in enumerate(zip(places.paths, places.values, cuts, strict=True)):
        names = [path]
        if cut is not None:
            names = [f"{path}/{k}" for k in range(len(cut.lengths))]
            entry = dataclasses.replace(entry, layout=entry.layout.of_parts())
        indices = range(len(paths), len(paths) + len(names))
        real += indices if i in places.real else ()
        rest += indices if i in places.rest else ()
        paths += names
        values += [entry] * len(names)
    return Places(tuple(paths), tuple(values), tuple(real), places.treedef, tuple(rest), cuts)


def check_geometry(name: str, geometry: Any) -> None:
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
            f"the parameter {path!r} has dtype {leaf.dtype}; steps need bfloat16 or wider. Keep"
            " the parameter in one of those, and cast where it is used."
        )
    try:
        entry.check_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(f"the parameter {path!r}: {error}") from error


def refuse_keys(places: Places, params: Any) -> None:
    """Raise `TypeError` for typed random keys among the parameters: Optax cannot update them."""
    leaves = places.leaves(params)
    keys = [
        places.paths[i]
        for i in (*places.real, *places.rest)
        if jnp.issubdtype(leaves[i].dtype, jax.dtypes.prng_key)
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


def manifold_of(entry: Entry) -> Manifold:
    """Return the manifold of an entry, without the entry's layout."""
    return entry.manifold if isinstance(entry, LaidOut) else entry


constrained = operator.attrgetter("constrained")
"""Return whether a manifold is constrained, as a function for `map_leaves(select=...)`."""


def inner_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter in its manifold's layout."""
    return entry.layout.inner_shape(shape) if isinstance(entry, LaidOut) else shape
