"""Key paths, and trees of values (manifolds, budgets, layouts) matched to parameters by path."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import shown

KeyPath = tuple[Any, ...]


def path_string(path: KeyPath) -> str:
    """Return a JAX key path as text: keys, attribute names and indices joined by `/`.

    For instance `"params/Dense_0/kernel"` (Flax), `"layers/0/weight"` (Equinox); the empty string
    for a tree that is a single array.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_keys(path: KeyPath) -> tuple[str, ...]:
    """Return the keys of a JAX key path as text, `("",)` for a tree that is a single array.

    Joined by `/` they are `path_string`; a key may itself contain `/`.
    """
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("",)


def nest(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return nested dictionaries with a level for each key of the values' paths."""
    tree: dict[str, Any] = {}
    for (*above, last), value in values.items():
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def flat(tree: Any) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a tree by the keys of their paths; undo `nest` for leaves."""
    return {path_keys(path): leaf for path, leaf in flatten_with_path(tree)[0]}


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

        Raise `ValueError` if a path matches no rule, or a rule is used for no path. A rule that
        matches only holes, nodes without a parameter, counts as used; if a `MaskedNode` hides part
        of the tree, rules may be unused. `name` is the argument's, for messages.
        """
        chosen = [self.first_match(path) for path in paths]
        unmatched = [path for path, rule in zip(paths, chosen, strict=True) if rule is None]
        if unmatched:
            patterns = [_format_pattern(pattern) for pattern, _ in self.rules]
            raise ValueError(
                f"{name}: no pattern matches the parameters {unmatched}; the patterns are"
                f" {patterns}. Add a pattern; see the page 'Get started'."
            )
        self.check_used(chosen, paths, holes, name)
        return [self.rules[rule][1] for rule in chosen if rule is not None]

    def check_used(
        self,
        chosen: Sequence[int | None],
        paths: Sequence[str],
        holes: Mapping[str, Any],
        name: str,
    ) -> None:
        """Raise `ValueError` if a rule is neither chosen for a path nor matches a hole first."""
        used = {*chosen, *map(self.first_match, holes)}
        unused = [_format_pattern(p) for i, (p, _) in enumerate(self.rules) if i not in used]
        if unused and not any(isinstance(node, optax.MaskedNode) for node in holes.values()):
            raise ValueError(
                f"{name}: the patterns {unused} match no parameter (an earlier pattern may have"
                f" taken theirs); the parameters are {list(paths)}. Correct or remove them."
            )

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


def refuse_unused(name: str, value: Any, tree: Any) -> None:
    """Raise `ValueError` if a pattern of a `by_path` object matches no leaf of the whole tree."""
    if not isinstance(value, ByPath):
        return
    leaves = [(path_string(path), x) for path, x in flatten_with_path(tree, is_hole)[0]]
    holes = {path: leaf for path, leaf in leaves if is_hole(leaf)}
    if paths := [path for path, _ in leaves if path not in holes]:
        value.check_used([*map(value.first_match, paths)], paths, holes, name)


def _regex(pattern: Pattern) -> str | re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        return pattern
    tokens = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", pattern)
    return "".join(tokens.get(part, re.escape(part)) for part in parts)


def _format_pattern(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def match_prefix(spec: Any, paths: Sequence[str], holes: Mapping[str, Any], name: str) -> list[Any]:
    """Return the value of the prefix-tree entry above each path.

    Entries and parameters are compared by path, not by container: nested dictionaries describe
    an Equinox module or a Flax state as well. Raise `ValueError` if a path has no entry or two, or
    an entry lies above no path. An entry that is above, at or below only holes, or is `None`, may
    be unused. `name` is the argument's, for messages.
    """
    pairs, _ = flatten_with_path(spec, is_leaf=lambda node: node is None)
    entries = [(path_string(path), value) for path, value in pairs]
    by_prefix: dict[str, list[tuple[str, Any]]] = {}
    for entry in entries:
        by_prefix.setdefault(entry[0], []).append(entry)
    # Linen's `WeightNorm` has a parameter "kernel/scale" next to "kernel", which is no branch.
    leaves = set(paths)
    matches = [
        [
            entry
            for prefix in prefixes(path)
            if prefix == path or prefix not in leaves
            for entry in by_prefix.get(prefix, ())
        ]
        for path in paths
    ]
    for path, pairs in zip(paths, matches, strict=True):
        listed = [entry for entry, _ in pairs or entries]
        if not pairs:
            globs = any("*" in entry for entry in listed)
            hint = "Put patterns into by_path" if globs else "Add one for it or for its branch"
            raise ValueError(
                f"{name} has no entry for the parameter {path!r}; the entries are {listed}. {hint}."
            )
        if len(pairs) > 1:
            raise ValueError(
                f"{name} has the entries {listed} for the parameter {path!r}. Keep a single entry."
            )
    above = {prefix for path in (*paths, *holes) for prefix in prefixes(path)}
    unused = [
        entry
        for entry, value in entries
        if value is not None and entry not in above and holes.keys().isdisjoint(prefixes(entry))
    ]
    if unused:
        raise ValueError(
            f"{name}: the entries {unused} describe no parameter; the parameters are {list(paths)}."
            " Correct or remove them."
        )
    return [value for ((_, value),) in matches]


def prefixes(path: str) -> list[str]:
    """Return the paths of the whole tree, of each branch above a node, and of the node itself."""
    keys = path.split("/")
    return [""] * (path != "") + ["/".join(keys[: i + 1]) for i in range(len(keys))]


def if_complex(dtype: Any) -> str:
    """Return an additional hint for complex parameters, or an empty string."""
    split = ", or keep its two parts as parameters (optax.contrib.split_real_and_imaginary)"
    return split if jnp.issubdtype(dtype, jnp.complexfloating) else ""
