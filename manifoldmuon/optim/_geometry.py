"""The geometry: which manifold each parameter lives on, found by key path.

A specification (of manifolds, layouts or budgets) is a prefix tree, what `by_path` returns, or a
function of path and leaf. It is held against a tree of parameters once for each structure.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import shown
from manifoldmuon.manifolds import LaidOut, Layout, Manifold

Geometry = Any
"""A prefix tree of `Manifold` and `LaidOut`, a `by_path` object, or a function of path and leaf."""


def resolve(geometry: Geometry, params: Any) -> Any:
    """The manifold of every parameter, as a tree of the parameters' structure.

    Nothing is guessed from a shape: every parameter is named by an entry, a pattern or the
    function.

    Args:
      geometry: a prefix tree of `Manifold` (or `LaidOut`, for another layout) over `params`,
        compared by path, so nested dictionaries describe any container; or what `by_path` returns;
        or a function `(path, leaf) -> Manifold` of the JAX key path (see `path_string`) and a
        `jax.ShapeDtypeStruct`. Boxes are no part of a path: a parameter has the same path bare and
        within a node whose one child is its attribute `value`, such as an `nnx.Variable`.
      params: the parameters: arrays or `jax.ShapeDtypeStruct`, in any registered pytree. `None`
        and `optax.MaskedNode` pass through.

    Returns:
      A tree of the structure of `params` whose leaves are manifolds.

    Raises:
      TypeError: if an entry is not a `Manifold`, or a parameter is no array of real floating point
        numbers of 16 bits or more.
      ValueError: if a parameter has no entry, an entry no parameter, or a shape does not fit
        its manifold. Every message names the path.
    """
    places = find_manifolds(geometry, params)
    return places.fill(params, {place: places.values[place] for place in places.real})


def path_string(path: tuple[Any, ...]) -> str:
    """A JAX key path as text: its keys, attribute names and indices joined by `/`.

    Args:
      path: a key path as `jax.tree_util.tree_flatten_with_path` gives it.

    Returns:
      For instance `"params/Dense_0/kernel"` (Flax), `"layers/0/weight"` (Equinox); the empty
      string for a tree that is a single array.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """`jax.tree_util.tree_flatten_with_path`, with paths that leave boxes out.

    A box is a node whose one child is its attribute `value`, as those of Flax are (`nnx.Variable`,
    `nn.Partitioned`). `nnx.Optimizer` initialises with boxes and updates without, and a state that
    is keyed by path has to find its parameters again. A module with other fields is no box.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    boxed = {path[:-1] for path, _ in pairs if path and path[-1] == _VALUE}
    if not boxed:
        return pairs, treedef
    below = collections.Counter(path[:n] for path, _ in pairs for n in range(len(path)))
    boxed = {path for path in boxed if below[path] == 1}
    return [(path[:-1] if path[:-1] in boxed else path, leaf) for path, leaf in pairs], treedef


_VALUE = jax.tree_util.GetAttrKey("value")


def is_hole(node: Any) -> bool:
    """True for `None` and `optax.MaskedNode`: places in a tree that hold no parameter."""
    return node is None or isinstance(node, optax.MaskedNode)


Pattern = str | re.Pattern[str]


@dataclasses.dataclass(frozen=True)
class ByPath:
    """Values chosen by patterns on the path; made by `by_path`.

    Not callable on purpose: `optax.inject_hyperparams` would take a callable for a schedule.

    Attributes:
      rules: `(pattern, value)` pairs in the order in which they are tried.
    """

    rules: tuple[tuple[Pattern, Any], ...]

    def assign(self, paths: Sequence[str], holes: Sequence[tuple[str, Any]] = ()) -> list[Any]:
        """The value of the first rule that matches each path.

        Args:
          paths: path strings of the parameters.
          holes: path and node of the places that hold none. A rule may decide for a `None`
            alone; where a `MaskedNode` hides part of the tree, rules may go unused.

        Returns:
          One value per path.

        Raises:
          ValueError: if a path matches no rule, or a rule decides for no path.
        """
        chosen = [self._first_match(path) for path in paths]
        unmatched = [path for path, rule in zip(paths, chosen, strict=True) if rule is None]
        if unmatched:
            patterns = [_text(pattern) for pattern, _ in self.rules]
            raise ValueError(
                f"no pattern matches the parameters {unmatched}; the patterns are {patterns}."
                " Add a pattern for them."
            )
        used = {*chosen, *(self._first_match(path) for path, _ in holes)}
        unused = [_text(p) for i, (p, _) in enumerate(self.rules) if i not in used]
        if unused and not any(isinstance(node, optax.MaskedNode) for _, node in holes):
            raise ValueError(
                f"the patterns {unused} decide for no parameter (an earlier pattern may have"
                f" taken theirs); the parameters are {list(paths)}. Correct or remove them."
            )
        return [self.rules[rule][1] for rule in chosen if rule is not None]

    def _first_match(self, path: str) -> int | None:
        for index, (pattern, _) in enumerate(self.rules):
            if re.fullmatch(_regex(pattern), path):
                return index
        return None


@dataclasses.dataclass(frozen=True)
class ByFunction:
    """Values chosen by a function, for `optax.inject_hyperparams`, which calls what is callable.

    Everywhere else the function itself will do.

    Attributes:
      function: `(path, leaf) -> value` of the JAX key path and a `jax.ShapeDtypeStruct`, as in
        `resolve`.

    Example:
      `optax.inject_hyperparams(manifold_muon)(0.1, ByFunction(geometry))`
    """

    function: Callable[[tuple[Any, ...], jax.ShapeDtypeStruct], Any]


def by_path(rules: Mapping[Pattern, Any]) -> ByPath:
    """Chooses a value (a manifold, a budget) for each parameter by its path.

    Args:
      rules: patterns and their values, tried in order; the first match decides. A string is a
        glob over the whole path: `*` and `?` match inside one segment, `**` across segments,
        also none. A compiled `re.Pattern` is matched against the whole path.

    Returns:
      An object accepted wherever a `geometry` or `budgets` is asked for. When it is used, a
      parameter without a pattern and a pattern without a parameter are errors that name them.

    Raises:
      TypeError: for a pattern that is neither a string nor a compiled one.

    Example:
      `by_path({"**/kernel": Stiefel().transposed(), "**/bias": Euclidean()})`, for (in, out)
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"by_path takes a dictionary of patterns and values; got {shown(rules)}")
    for pattern in rules:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(
                f"a pattern of by_path is a string or a compiled re.Pattern; got {pattern!r}."
                " The keys and indices of a path are text: '0' or '*'."
            )
    return ByPath(tuple(rules.items()))


def _regex(pattern: Pattern) -> str | re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        return pattern
    tokens = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", pattern)
    return "".join(tokens.get(part, re.escape(part)) for part in parts)


def _text(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def match_prefix(spec: Any, paths: Sequence[str], holes: Sequence[tuple[str, Any]]) -> list[Any]:
    """The value of the prefix-tree entry above each path.

    Entries and parameters are compared by path, not by container: nested dictionaries describe
    an Equinox module or a Flax state as well.

    Args:
      spec: a tree of values; a single value is a tree, too. `None` is a value, but may go unused.
      paths: path strings of the parameters.
      holes: path and node of the places that hold none; entries at or below them may go unused.

    Returns:
      One entry per path, whatever its type.

    Raises:
      ValueError: if a path has no entry or two, or an entry stands above no path.
    """
    pairs, _ = flatten_with_path(spec, is_leaf=lambda node: node is None)
    entries = [(path_string(path), value) for path, value in pairs]
    found = [[value for entry, value in entries if _above(entry, path)] for path in paths]
    for path, values in zip(paths, found, strict=True):
        if len(values) != 1:
            globs = any("*" in entry for entry, _ in entries)
            hint = "Put patterns into by_path" if globs else "Give every parameter exactly one"
            raise ValueError(
                f"the parameter {path!r} has {len(values) or 'no'} entries above it; the entries"
                f" are {[entry for entry, _ in entries]}. {hint}."
            )
    seen = [*paths, *(hole for hole, _ in holes)]
    unused = [
        entry
        for entry, value in entries
        if value is not None
        and not any(_above(entry, path) for path in seen)
        and not any(_above(hole, entry) for hole, _ in holes)
    ]
    if unused:
        raise ValueError(
            f"the entries {unused} describe no parameter; the parameters are {list(paths)}."
            " Correct or remove them."
        )
    return [values[0] for values in found]


def _above(prefix: str, path: str) -> bool:
    return prefix in ("", path) or path.startswith(prefix + "/")


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """A tree taken apart: its places, and what a specification says of each.

    Attributes:
      paths: of every place, holes included.
      values: of every place; None for a hole.
      real: the places that hold a parameter.
      treedef: the structure, with holes as leaves.
    """

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    real: tuple[int, ...]
    treedef: Any

    def leaves(self, tree: Any) -> list[Any]:
        """The leaf of every place of a tree of this structure."""
        return self.treedef.flatten_up_to(tree)

    def fill(self, tree: Any, leaves: Mapping[int, Any]) -> Any:
        """A tree of this structure, with other leaves in some places."""
        filled = self.leaves(tree)
        for place, leaf in leaves.items():
            filled[place] = leaf
        return jax.tree.unflatten(self.treedef, filled)


Check = Callable[[str, Any, jax.ShapeDtypeStruct], None]


def find_places(spec: Any, tree: Any, check: Check) -> Places:
    """Takes a tree apart and finds the value of every leaf; kept for the next tree of its kind.

    Args:
      spec: a prefix tree of values, a `ByPath`, or a function of JAX key path and leaf.
      tree: parameters or updates; may hold `None` and `MaskedNode`.
      check: a function at module level that raises, given path, value and leaf, where value and
        leaf do not fit.

    Raises:
      ValueError: for a leaf without a value, an entry without a leaf, or two leaves whose paths
        read the same.
    """
    pairs, treedef = flatten_with_path(tree, is_leaf=is_hole)
    spec = spec.function if isinstance(spec, ByFunction) else spec
    key_paths = tuple(path for path, _ in pairs)
    leaves = tuple(_abstract(path, leaf) for path, leaf in pairs)
    if callable(spec) and not isinstance(spec, type):
        # Call it each time: what it has captured may have changed, and the cache must not keep it.
        pairs = zip(key_paths, leaves, strict=True)
        spec = _PerLeaf(tuple(None if is_hole(x) else spec(path, x) for path, x in pairs))
    arguments = _Spec(spec), key_paths, leaves, treedef, check
    try:
        return _find_once(*arguments)
    except TypeError as error:
        if "unhashable" not in str(error):  # budgets that are arrays, say
            raise
        return _find(*arguments)


@dataclasses.dataclass(frozen=True)
class _PerLeaf:
    """One value per leaf, None for holes: what a function has returned."""

    values: tuple[Any, ...]


class _Spec:
    """A specification, compared by what it says."""

    def __init__(self, spec: Any):
        self.spec = spec
        if isinstance(spec, ByPath):
            self.key = spec, tuple(type(value) for _, value in spec.rules)
        elif isinstance(spec, _PerLeaf):
            self.key = spec, tuple(map(type, spec.values))
        else:
            leaves, treedef = jax.tree.flatten(spec)
            # The types as well: True, 1 and 1.0 are equal.
            self.key = treedef, tuple(leaves), tuple(map(type, leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _find(spec: _Spec, key_paths: Any, leaves: Any, treedef: Any, check: Check) -> Places:
    paths = tuple(map(path_string, key_paths))
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"the parameter paths {twice} occur more than once: rename a key.")
    real = tuple(place for place, leaf in enumerate(leaves) if not is_hole(leaf))
    values: list[Any] = [None] * len(paths)
    if real:  # an empty or wholly masked tree fits every specification
        holes = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if is_hole(leaf)]
        named = [paths[place] for place in real]
        if isinstance(spec.spec, ByPath):
            chosen = spec.spec.assign(named, holes)
        elif isinstance(spec.spec, _PerLeaf):
            chosen = [spec.spec.values[place] for place in real]
        else:
            chosen = match_prefix(spec.spec, named, holes)
        for place, value in zip(real, chosen, strict=True):
            check(paths[place], value, leaves[place])
            values[place] = value
    return Places(paths, tuple(values), real, treedef)


_find_once = functools.lru_cache(maxsize=512)(_find)


def _abstract(path: tuple[Any, ...], leaf: Any) -> Any:
    if is_hole(leaf):
        return leaf
    try:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)
    except TypeError as error:
        hint = "Take the parameters alone: equinox.filter(model, equinox.is_inexact_array), say"
        if isinstance(leaf, Manifold | LaidOut | ByPath | ByFunction):
            hint = "A geometry stands before the parameters: were the two exchanged?"
        raise TypeError(
            f"the leaf {path_string(path)!r} is a {type(leaf).__name__}, and no array. {hint}"
        ) from error


def find_manifolds(geometry: Geometry, params: Any) -> Places:
    """`find_places` for a geometry, with every manifold, dtype and shape checked; see `resolve`."""
    return find_places(geometry, params, _check_manifold)


def if_complex(dtype: Any) -> str:
    """Return a further hint for complex parameters."""
    split = ", or keep its two parts as parameters (optax.contrib.split_real_and_imaginary)"
    return split if jnp.issubdtype(dtype, jnp.complexfloating) else ""


def check_entry(path: str, entry: Any) -> None:
    """Raise `TypeError` unless an entry of a geometry is a manifold."""
    if not isinstance(entry, Manifold | LaidOut):
        hint = "; write an instance, with parentheses" if isinstance(entry, type) else ""
        if isinstance(entry, Layout):
            hint = "; write Manifold.with_axes(...) for a manifold in another layout"
        raise TypeError(f"the geometry of {path!r} is {shown(entry)}, not a Manifold{hint}.")


def _check_manifold(path: str, entry: Any, leaf: jax.ShapeDtypeStruct) -> None:
    check_entry(path, entry)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"the parameter {path!r} has dtype {leaf.dtype}; only real floating point"
            " parameters live on a manifold. Take it out with optax.masked or optax.partition"
            f"{if_complex(leaf.dtype)}."
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


def map_geometry(function: Callable[[Manifold], Manifold], geometry: Geometry) -> Geometry:
    """The geometry with another manifold for each of its own; what is none stays as it is."""

    def mapped(entry: Any) -> Any:
        if isinstance(entry, LaidOut):
            return dataclasses.replace(entry, manifold=function(entry.manifold))
        return function(entry) if isinstance(entry, Manifold) else entry

    if isinstance(geometry, ByPath):
        return ByPath(tuple((pattern, mapped(value)) for pattern, value in geometry.rules))
    geometry = geometry.function if isinstance(geometry, ByFunction) else geometry
    if callable(geometry) and not isinstance(geometry, type):
        return lambda path, leaf: mapped(geometry(path, leaf))
    return jax.tree.map(mapped, geometry)


def manifold_of(entry: Manifold | LaidOut) -> Manifold:
    """The manifold of an entry of a geometry, in its own layout."""
    return entry.manifold if isinstance(entry, LaidOut) else entry


def inner_shape(entry: Manifold | LaidOut, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter in its manifold's layout."""
    return entry.layout.inner_shape(shape) if isinstance(entry, LaidOut) else shape
