"""Flattened trees with a value for each leaf, found once for a structure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from manifoldmuon._internal.trees.paths import (
    ByPath,
    flatten_with_path,
    is_function,
    is_hole,
    match_prefix,
    path_keys,
    path_string,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Matched:
    """A flattened tree, and the value of a specification for each leaf.

    Attributes:
      keys: keys of the path of every leaf, holes included.
      values: value for every leaf; None for a hole.
      real: indices of the leaves that are parameters.
      treedef: the structure, with holes as leaves.
    """

    keys: tuple[tuple[str, ...], ...]
    values: tuple[Any, ...]
    real: tuple[int, ...]
    treedef: Any

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Return the path of every leaf as text."""
        return tuple("/".join(keys) for keys in self.keys)

    def leaves(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree of this structure."""
        return self.treedef.flatten_up_to(tree)

    def fill(self, tree: Any, leaves: Mapping[int, Any]) -> Any:
        """Return a tree of this structure, with other leaves at some indices."""
        filled = self.leaves(tree)
        for i, leaf in leaves.items():
            filled[i] = leaf
        return jax.tree.unflatten(self.treedef, filled)


LeafCheck = Callable[[str, Any, jax.ShapeDtypeStruct], None]


def match(spec: Any, tree: Any, check: LeafCheck, name: str) -> Matched:
    """Flatten a tree and find the value for every leaf; cached by structure, shapes and dtypes.

    Args:
      spec: a prefix tree of values, a `ByPath`, or a function of JAX key path and leaf.
      tree: parameters or updates; may hold `None` and `MaskedNode`.
      check: a function of path, value and leaf that raises if value and leaf do not fit; defined
        at module level, since the cache compares it.
      name: the argument's name, for messages.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_hole)
    try:
        abstract = tuple([x if is_hole(x) else (x.shape, x.dtype) for x in leaves])
    except AttributeError:  # Python numbers, or no arrays at all
        abstract = _shapes_and_dtypes(tree)
    if is_function(spec):
        # Call it each time: captured variables may have changed, and the cache must not keep them.
        pairs = zip(flatten_with_path(tree, is_hole)[0], abstract, strict=True)
        values = [None if is_hole(x) else spec(p, jax.ShapeDtypeStruct(*x)) for (p, _), x in pairs]
        structure = None
    elif isinstance(spec, ByPath):
        structure, values = (tuple(rule[k] for rule in spec.rules) for k in (0, 1))
    else:
        values, structure = jax.tree.flatten(spec)
    # The types as well: True, 1 and 1.0 are equal.
    given = structure, tuple(values), tuple(map(type, values)), abstract, treedef, check, name
    try:
        hash(given)
    except TypeError:  # budgets that are arrays, for example
        return _match_flat(*given)
    return _find_once(*given)


def _match_flat(
    structure: Any,
    values: tuple[Any, ...],
    types: tuple[type, ...],
    abstract: tuple[Any, ...],
    treedef: Any,
    check: LeafCheck,
    name: str,
) -> Matched:
    """Return the result of `match` for a flattened specification.

    `structure` holds the patterns of a `ByPath`, None for a value per leaf, or a treedef.
    """
    pairs, _ = flatten_with_path(jax.tree.unflatten(treedef, list(range(len(abstract)))))
    keys = tuple(path_keys(path) for path, _ in pairs)
    paths = ["/".join(x) for x in keys]
    refuse_repeated(paths)
    real = tuple(i for i, leaf in enumerate(abstract) if not is_hole(leaf))
    matched: list[Any] = [None] * len(paths)
    if real:  # an empty or fully masked tree fits every specification
        holes = {path: leaf for path, leaf in zip(paths, abstract, strict=True) if is_hole(leaf)}
        named = [paths[i] for i in real]
        if structure is None:
            chosen = [values[i] for i in real]
        elif isinstance(structure, tuple):
            chosen = ByPath(tuple(zip(structure, values, strict=True))).assign(named, holes, name)
        else:
            chosen = match_prefix(jax.tree.unflatten(structure, values), named, holes, name)
        for i, value in zip(real, chosen, strict=True):
            check(paths[i], value, jax.ShapeDtypeStruct(*abstract[i]))
            matched[i] = value
    return Matched(keys, tuple(matched), real, treedef)


_find_once = functools.lru_cache(maxsize=512)(_match_flat)


def refuse_repeated(paths: Sequence[str]) -> None:
    """Raise `ValueError` if two paths read the same."""
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"the parameter paths {twice} occur more than once: rename a key.")


def _shapes_and_dtypes(tree: Any) -> tuple[Any, ...]:
    """Return `(shape, dtype)` for each leaf, and holes unchanged."""
    structs = []
    for path, leaf in flatten_with_path(tree, is_hole)[0]:
        if is_hole(leaf):
            structs.append(leaf)
            continue
        try:
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
            structs.append((jnp.shape(leaf), dtype))
        except TypeError as error:
            hint = "Take the parameters alone: equinox.filter(model, equinox.is_inexact_array)"
            if isinstance(leaf, ByPath) or hasattr(leaf, "check_shape"):
                hint = "A geometry stands before the parameters: were the two exchanged?"
            raise TypeError(
                f"the leaf {path_string(path)!r} is a {type(leaf).__name__}, not an array. {hint}"
            ) from error
    return tuple(structs)
