"""The geometry: which manifold each parameter lives on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._paths import (
    ByPath,
    flatten_with_holes,
    is_hole,
    match_prefix,
    path_string,
)

Geometry = Any
"""A prefix tree of `Manifold`, a `by_path` object, or a function `(path, leaf) -> Manifold`."""


class Layout(NamedTuple):
    """A tree taken apart: its places with path, leaf and value, and how to put it together.

    Attributes:
      paths: path string of every place, holes included.
      leaves: the leaf of every place; `None` or `MaskedNode` for a hole.
      values: the side-car value of every place (a manifold, a budget); `None` for a hole.
      treedef: structure with holes as leaves.
    """

    paths: list[str]
    leaves: list[Any]
    values: list[Any]
    treedef: Any

    def indices(self) -> list[int]:
        """The places that hold a parameter."""
        return [i for i, leaf in enumerate(self.leaves) if not is_hole(leaf)]

    def rebuild(self, leaves: list[Any]) -> Any:
        """A tree of this structure with other leaves."""
        return jax.tree.unflatten(self.treedef, leaves)


def lay_out(spec: Any, tree: Any, is_value: Callable[[Any], bool]) -> Layout:
    """Takes a tree apart and finds the side-car value of every leaf.

    Args:
      spec: a prefix tree of values, a `ByPath`, or a function of JAX key path and leaf.
      tree: parameters or updates; may hold `None` and `MaskedNode`.
      is_value: tells a value from a node of a prefix tree.

    Returns:
      The layout, whose values may still be of a wrong type: check them.

    Raises:
      ValueError: for a leaf without a value, an entry without a leaf, or two leaves whose paths
        read the same.
    """
    pairs, treedef = flatten_with_holes(tree)
    paths = [path_string(path) for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    if len(set(paths)) < len(paths):
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(f"the parameter paths {twice} occur more than once: rename a key.")
    layout = Layout(paths, leaves, [None] * len(leaves), treedef)
    real = layout.indices()
    if not real:  # an empty or wholly masked tree fits every specification
        return layout
    named = [paths[i] for i in real]
    holes = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if is_hole(leaf)]
    if isinstance(spec, ByPath):
        chosen = spec.assign(named, holes)
    elif callable(spec) and not isinstance(spec, type):
        chosen = [spec(*pairs[i]) for i in real]
    else:
        chosen = match_prefix(spec, named, holes, is_value)
    for index, value in zip(real, chosen, strict=True):
        layout.values[index] = value
    return layout


def lay_out_geometry(geometry: Geometry, params: Any) -> Layout:
    """`lay_out` for a geometry, with every manifold, dtype and shape checked.

    Raises:
      TypeError: if an entry is not a `Manifold`, or a parameter is not a real floating array.
      ValueError: as `lay_out`, or if a shape does not fit its manifold.
    """
    layout = lay_out(geometry, params, lambda node: isinstance(node, Manifold))
    for index in layout.indices():
        path, leaf, manifold = layout.paths[index], layout.leaves[index], layout.values[index]
        if not isinstance(manifold, Manifold):
            hint = "; write an instance, with parentheses" if isinstance(manifold, type) else ""
            raise TypeError(f"the geometry of {path!r} is {manifold!r}, not a Manifold{hint}.")
        if not jnp.issubdtype(_dtype(leaf), jnp.floating):
            raise TypeError(
                f"the parameter {path!r} has dtype {_dtype(leaf)}; only real floating point"
                " parameters live on a manifold. Take it out with optax.masked or optax.partition."
            )
        try:
            manifold.check_shape(jnp.shape(leaf))
        except ValueError as error:
            raise ValueError(f"the parameter {path!r}: {error}") from error
    return layout


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def resolve(geometry: Geometry, params: Any) -> Any:
    """The manifold of every parameter, as a tree of the parameters' structure.

    Nothing is guessed from a shape: every parameter is named by an entry, a pattern or the
    function.

    Args:
      geometry: a prefix tree of `Manifold` over `params` (compared by path, so nested
        dictionaries describe any container); or what `by_path` returns; or a function
        `(path, leaf) -> Manifold` of the JAX key path (see `path_string`).
      params: the parameters: arrays or `jax.ShapeDtypeStruct`, in any registered pytree. `None`
        and `optax.MaskedNode` pass through.

    Returns:
      A tree of the structure of `params` whose leaves are manifolds.

    Raises:
      TypeError: if an entry is not a `Manifold` or a parameter is not floating point.
      ValueError: if a parameter has no entry, an entry no parameter, or a shape does not fit
        its manifold. Every message names the path.
    """
    layout = lay_out_geometry(geometry, params)
    values = [
        leaf if is_hole(leaf) else manifold
        for leaf, manifold in zip(layout.leaves, layout.values, strict=True)
    ]
    return layout.rebuild(values)
