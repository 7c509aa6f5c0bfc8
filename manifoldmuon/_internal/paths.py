"""Key paths, and trees of values (manifolds, budgets, layouts) matched to parameters by path."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.mesh import placed_like, whole_along

KeyPath = tuple[Any, ...]


def path_string(path: KeyPath) -> str:
    """Return a JAX key path as text: keys, attribute names and indices joined by `/`.

    Args:
      path: a key path of `jax.tree_util.tree_flatten_with_path`.

    Returns:
      For instance `"params/Dense_0/kernel"` (Flax), `"layers/0/weight"` (Equinox); the empty
      string for a tree that is a single array.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """Return `jax.tree_util.tree_flatten_with_path`, without boxes in the paths.

    A box is a node with a single child, its attribute `value`, as in Flax (`nnx.Variable`,
    `nn.Partitioned`). `nnx.Optimizer` initialises with boxes and updates without them; a state
    keyed by path must find its parameters in both cases. A module with other fields is not a box.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    boxed = {path[:-1] for path, _ in pairs if path and path[-1] == _VALUE}
    if not boxed:
        return pairs, treedef
    below = collections.Counter(path[:n] for path, _ in pairs for n in range(len(path)))
    boxed = {path for path in boxed if below[path] == 1}
    return [(path[:-1] if path[:-1] in boxed else path, leaf) for path, leaf in pairs], treedef


_VALUE = jax.tree_util.GetAttrKey("value")


def is_box(node: Any) -> bool:
    """Return whether a node is a box with a single leaf; see `flatten_with_path`."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [path for path, _ in pairs] == [(_VALUE,)] and jax.tree_util.all_leaves([pairs[0][1]])


def is_hole(node: Any) -> bool:
    """Return whether a node is `None` or `optax.MaskedNode`: a node without a parameter."""
    return node is None or isinstance(node, optax.MaskedNode)


def is_function(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Return whether a value is a function and not a callable pytree.

    Equinox modules are callable pytrees, and a geometry may have the structure of a module.
    """
    return callable(value) and not isinstance(value, type) and jax.tree_util.all_leaves([value])


Pattern = str | re.Pattern[str]


@dataclasses.dataclass(frozen=True)
class ByPath:
    """Values chosen by patterns on the path; made by `by_path`.

    Not callable on purpose: `optax.inject_hyperparams` would take a callable for a schedule.

    Attributes:
      rules: `(pattern, value)` pairs, tried in this order.
    """

    rules: tuple[tuple[Pattern, Any], ...]

    def assign(self, paths: Sequence[str], holes: Mapping[str, Any], name: str) -> list[Any]:
        """Return the value of the first rule that matches each path.

        Args:
          paths: path strings of the parameters.
          holes: nodes without a parameter, by path. A rule that matches only holes counts as used;
            if a `MaskedNode` hides part of the tree, rules may be unused.
          name: the argument's name, for messages.

        Raises:
          ValueError: a path matches no rule, or a rule is used for no path.
        """
        chosen = [self.first_match(path) for path in paths]
        unmatched = [path for path, rule in zip(paths, chosen, strict=True) if rule is None]
        if unmatched:
            patterns = [_text(pattern) for pattern, _ in self.rules]
            raise ValueError(
                f"{name}: no pattern matches the parameters {unmatched}; the patterns are"
                f" {patterns}."
                " Add a pattern for them; the page 'Get started' says which."
            )
        used = {*chosen, *map(self.first_match, holes)}
        unused = [_text(p) for i, (p, _) in enumerate(self.rules) if i not in used]
        if unused and not any(isinstance(node, optax.MaskedNode) for node in holes.values()):
            raise ValueError(
                f"{name}: the patterns {unused} match no parameter (an earlier pattern may have"
                f" taken theirs); the parameters are {list(paths)}. Correct or remove them."
            )
        return [self.rules[rule][1] for rule in chosen if rule is not None]

    def first_match(self, path: str) -> int | None:
        """Return the index of the first rule that matches a path, or None."""
        for index, (pattern, _) in enumerate(self.rules):
            if re.fullmatch(_regex(pattern), path):
                return index
        return None


if TYPE_CHECKING:
    _Value = TypeVar("_Value")
    Spec = (
        _Value
        | ByPath
        | Mapping[str, Any]
        | Sequence[Any]
        | Callable[[KeyPath, jax.ShapeDtypeStruct], _Value]
    )
else:

    class Spec:
        """A value for every parameter: a prefix tree, a `ByPath`, or a function of path and leaf.

        Not checked at run time, because any container may be a prefix tree.
        """

        def __class_getitem__(cls, kind):
            return Any


def by_path(rules: Mapping[Pattern, Any]) -> ByPath:
    """Choose a value (a manifold, a budget) for each parameter by its path.

    Args:
      rules: patterns and their values, tried in order; the first match decides. A string is a
        glob over the whole path: `*` and `?` match inside one segment, `**` across segments,
        including none. A compiled `re.Pattern` is matched against the whole path.

    Returns:
      An object accepted as any `geometry` or `budgets`. On use, a parameter without a pattern or a
      pattern without a parameter raises an error that names it.

    Raises:
      TypeError: `rules` is not a dictionary, or a pattern is neither a string nor a `re.Pattern`.

    Examples:
      >>> kernel = mm.manifolds.Stiefel().transposed()  # (in, out)
      >>> geometry = by_path({"**/kernel": kernel, "**/bias": mm.manifolds.Euclidean()})
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


def match_prefix(spec: Any, paths: Sequence[str], holes: Mapping[str, Any], name: str) -> list[Any]:
    """Return the value of the prefix-tree entry above each path.

    Entries and parameters are compared by path, not by container: nested dictionaries describe
    an Equinox module or a Flax state as well.

    Args:
      spec: a tree of values, or a single value. `None` is a value, and may be unused.
      paths: path strings of the parameters.
      holes: nodes without a parameter, by path. An entry that is above, at or below only holes is
        no error.
      name: the argument's name, for messages.

    Raises:
      ValueError: a path has no entry or two, or an entry lies above no path.
    """
    pairs, _ = flatten_with_path(spec, is_leaf=lambda node: node is None)
    entries = [(path_string(path), value) for path, value in pairs]
    found = [[pair for pair in entries if _above(pair[0], path)] for path in paths]
    for path, pairs in zip(paths, found, strict=True):
        listed = [entry for entry, _ in pairs or entries]
        if not pairs:
            globs = any("*" in entry for entry in listed)
            hint = "Put patterns into by_path" if globs else "Add one for it or for its branch"
            raise ValueError(
                f"{name} has no entry for the parameter {path!r}; the entries are {listed}. {hint}."
            )
        if len(pairs) > 1:
            raise ValueError(
                f"{name} has the entries {listed} for the parameter {path!r}. Keep one of them."
            )
    unused = [
        entry
        for entry, value in entries
        if value is not None
        and not any(_above(entry, path) for path in (*paths, *holes))
        and not any(_above(hole, entry) for hole in holes)
    ]
    if unused:
        raise ValueError(
            f"{name}: the entries {unused} describe no parameter; the parameters are {list(paths)}."
            " Correct or remove them."
        )
    return [value for ((_, value),) in found]


def _above(prefix: str, path: str) -> bool:
    return prefix in ("", path) or path.startswith(prefix + "/")


@dataclasses.dataclass(frozen=True)
class Cut:
    """Consecutive parts of unequal lengths along an axis of a parameter.

    Attributes:
      axis: the axis, as a negative number.
      lengths: lengths of the parts.
    """

    axis: int
    lengths: tuple[int, ...]

    def parts(self, leaf: Any) -> list[Any]:
        """Return the parts of an array; repeat a leaf without this length once for every part.

        Budgets are such leaves: numbers, or arrays with axes of length 1.
        """
        shape = getattr(leaf, "shape", ())
        if len(shape) < -self.axis or shape[self.axis] != sum(self.lengths):
            return [leaf] * len(self.lengths)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(self.parts, leaf)
        found, end = [], 0
        leaf = whole_along(leaf, self.axis)
        after = (slice(None),) * (-1 - self.axis)
        for length in self.lengths:
            end += length
            found.append(leaf[(..., slice(end - length, end), *after)])
        return found

    def join(self, parts: Sequence[Any]) -> Any:
        """Undo `parts`."""
        if not all(hasattr(part, "shape") for part in parts):
            return parts[0]
        if isinstance(parts[0], jax.ShapeDtypeStruct):
            return jax.eval_shape(self.join, parts)
        return jnp.concatenate(parts, self.axis)


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """A flattened tree, and the value of a specification for each leaf.

    Attributes:
      paths: path of every leaf, holes included.
      values: value for every leaf; None for a hole.
      real: indices of the leaves that are parameters.
      treedef: the structure, with holes as leaves.
      rest: indices of the parameters that another optimizer updates (for a geometry); not in
        `real`.
      cuts: for each leaf of the structure, its cut into several leaves, or None; empty without
        cuts.
    """

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    real: tuple[int, ...]
    treedef: Any
    rest: tuple[int, ...] = ()
    cuts: tuple[Cut | None, ...] = ()

    def leaves(self, tree: Any) -> list[Any]:
        """Return the leaves of a tree of this structure."""
        return self.spread(self.treedef.flatten_up_to(tree))

    def spread(self, leaves: Sequence[Any]) -> list[Any]:
        """Return all leaves of the structure, with cut leaves replaced by their parts."""
        if not self.cuts:
            return list(leaves)
        pairs = zip(leaves, self.cuts, strict=True)
        return [
            part for leaf, cut in pairs for part in ([leaf] if cut is None else cut.parts(leaf))
        ]

    def unflatten(self, leaves: Sequence[Any], like: Any) -> Any:
        """Return the tree of these leaves; joined parts get the shardings of the tree `like`."""
        if self.cuts:
            rest, joined = iter(leaves), []
            for cut, whole in zip(self.cuts, self.treedef.flatten_up_to(like), strict=True):
                if cut is None:
                    joined.append(next(rest))
                else:
                    leaf = cut.join([next(rest) for _ in cut.lengths])
                    placed = placed_like(leaf, whole) if isinstance(leaf, jax.Array) else leaf
                    joined.append(placed)
            leaves = joined
        return jax.tree.unflatten(self.treedef, leaves)

    def fill(self, tree: Any, leaves: Mapping[int, Any]) -> Any:
        """Return a tree of this structure, with other leaves at some indices."""
        filled = self.leaves(tree)
        for place, leaf in leaves.items():
            filled[place] = leaf
        return self.unflatten(filled, tree)


Check = Callable[[str, Any, jax.ShapeDtypeStruct], None]


def find_places(spec: Any, tree: Any, check: Check, name: str) -> Places:
    """Flatten a tree and find the value for every leaf; cached by structure, shapes and dtypes.

    Args:
      spec: a prefix tree of values, a `ByPath`, or a function of JAX key path and leaf.
      tree: parameters or updates; may hold `None` and `MaskedNode`.
      check: a function of path, value and leaf that raises if value and leaf do not fit; defined
        at module level, since the cache compares it.
      name: the argument's name, for messages.

    Raises:
      TypeError: a leaf is not an array.
      ValueError: a leaf has no value, an entry has no leaf, or two leaves have the same path.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_hole)
    try:
        abstract = tuple([x if is_hole(x) else (x.shape, x.dtype) for x in leaves])
    except AttributeError:  # Python numbers, or no arrays at all
        abstract = _abstract(tree)
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
        return _find(*given)
    return _find_once(*given)


def _find(
    structure: Any,
    values: tuple[Any, ...],
    types: tuple[type, ...],
    abstract: tuple[Any, ...],
    treedef: Any,
    check: Check,
    name: str,
) -> Places:
    """Return the result of `find_places` for a flattened specification.

    `structure` holds the patterns of a `ByPath`, None for a value per leaf, or a treedef.
    """
    pairs, _ = flatten_with_path(jax.tree.unflatten(treedef, list(range(len(abstract)))))
    paths = tuple(path_string(path) for path, _ in pairs)
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"the parameter paths {twice} occur more than once: rename a key.")
    real = tuple(place for place, leaf in enumerate(abstract) if not is_hole(leaf))
    found: list[Any] = [None] * len(paths)
    if real:  # an empty or fully masked tree fits every specification
        holes = {path: leaf for path, leaf in zip(paths, abstract, strict=True) if is_hole(leaf)}
        named = [paths[place] for place in real]
        if structure is None:
            chosen = [values[place] for place in real]
        elif isinstance(structure, tuple):
            chosen = ByPath(tuple(zip(structure, values, strict=True))).assign(named, holes, name)
        else:
            chosen = match_prefix(jax.tree.unflatten(structure, values), named, holes, name)
        for place, value in zip(real, chosen, strict=True):
            check(paths[place], value, jax.ShapeDtypeStruct(*abstract[place]))
            found[place] = value
    return Places(paths, tuple(found), real, treedef)


_find_once = functools.lru_cache(maxsize=512)(_find)


def _abstract(tree: Any) -> tuple[Any, ...]:
    """Return `(shape, dtype)` for each leaf, and holes unchanged."""
    found = []
    for path, leaf in flatten_with_path(tree, is_hole)[0]:
        if is_hole(leaf):
            found.append(leaf)
            continue
        try:
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
            found.append((jnp.shape(leaf), dtype))
        except TypeError as error:
            hint = "Take the parameters alone: equinox.filter(model, equinox.is_inexact_array)"
            if isinstance(leaf, ByPath) or hasattr(leaf, "check_shape"):
                hint = "A geometry stands before the parameters: were the two exchanged?"
            raise TypeError(
                f"the leaf {path_string(path)!r} is a {type(leaf).__name__}, not an array. {hint}"
            ) from error
    return tuple(found)


def if_complex(dtype: Any) -> str:
    """Return an additional hint for complex parameters, or an empty string."""
    split = ", or keep its two parts as parameters (optax.contrib.split_real_and_imaginary)"
    return split if jnp.issubdtype(dtype, jnp.complexfloating) else ""
