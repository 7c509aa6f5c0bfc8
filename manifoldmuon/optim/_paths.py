"""Side-car data: giving every parameter of a tree its value by key path."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax


def path_string(path: tuple[Any, ...]) -> str:
    """A JAX key path as text: its keys, attribute names and indices joined by `/`.

    Args:
      path: a key path as `jax.tree_util.tree_flatten_with_path` gives it.

    Returns:
      For instance `"params/Dense_0/kernel"` (Flax), `"layers/0/weight"` (Equinox); the empty
      string for a tree that is a single array.
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_hole(node: Any) -> bool:
    """True for `None` and `optax.MaskedNode`: places in a tree that hold no parameter."""
    return node is None or isinstance(node, optax.MaskedNode)


def flatten_with_holes(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """`tree_flatten_with_path`, with `None` and `MaskedNode` kept as leaves."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_hole)


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


def by_path(rules: Mapping[Pattern, Any]) -> ByPath:
    """Chooses a value (a manifold, a budget) for each parameter by its path.

    Args:
      rules: patterns and their values, tried in order; the first match decides. A string is a
        glob over the whole path: `*` and `?` match inside one segment, `**` across segments,
        also none. A compiled `re.Pattern` is matched against the whole path.

    Returns:
      An object accepted wherever a `geometry` or `budgets` is asked for. When it is used, a
      parameter without a pattern and a pattern without a parameter are errors that name them.

    Example:
      `by_path({"**/kernel": Stiefel(), "**/bias": Euclidean(...)})`
    """
    return ByPath(tuple(rules.items()))


def _regex(pattern: Pattern) -> str | re.Pattern[str]:
    if isinstance(pattern, re.Pattern):
        return pattern
    tokens = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*|\*\*|\*|\?)", pattern)
    return "".join(tokens.get(part, re.escape(part)) for part in parts)


def _text(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def match_prefix(
    spec: Any, paths: Sequence[str], holes: Sequence[tuple[str, Any]], is_value: Callable
) -> list[Any]:
    """The value of the prefix-tree entry above each path.

    Entries and parameters are compared by path, not by container: nested dictionaries describe
    an Equinox module or a Flax state as well.

    Args:
      spec: a tree of values; a single value is a tree, too.
      paths: path strings of the parameters.
      holes: path and node of the places that hold none; entries at or below them may go unused.
      is_value: tells a value from a node of the tree.

    Returns:
      One entry per path, whatever its type.

    Raises:
      ValueError: if a path has no entry or two, or an entry stands above no path.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_value)
    entries = [(path_string(path), value) for path, value in pairs]
    found = [[value for entry, value in entries if _above(entry, path)] for path in paths]
    for path, values in zip(paths, found, strict=True):
        if len(values) != 1:
            raise ValueError(
                f"the parameter {path!r} has {len(values) or 'no'} entries above it; the entries"
                f" are {[entry for entry, _ in entries]}. Give every parameter exactly one."
            )
    seen = [*paths, *(hole for hole, _ in holes)]
    unused = [
        entry
        for entry, _ in entries
        if not any(_above(entry, path) for path in seen)
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
