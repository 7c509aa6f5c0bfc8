"""Bringing updates and parameters together, with errors that name the parameter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.optim._geometry import Layout, lay_out_geometry
from manifoldmuon.optim._paths import flatten_with_holes, is_hole, path_string


class Pair(NamedTuple):
    """One parameter that is being updated."""

    index: int
    path: str
    manifold: Any
    param: jax.Array
    update: jax.Array


def pair_up(geometry: Any, updates: Any, params: Any, name: str) -> tuple[Layout, list[Any], list]:
    """Pairs every update with its parameter and manifold.

    Args:
      geometry: see `resolve`.
      updates: the incoming updates.
      params: the current parameters.
      name: the transformation's name for error messages.

    Returns:
      The layout of the parameters, the incoming update of every place, and the pairs to work
      on. Places without a parameter or without an update, and arrays without entries, are in no
      pair: their update passes through.

    Raises:
      ValueError: if `params` is None, or the trees or shapes differ.
      TypeError: if an update is not floating point.
    """
    if params is None:
        raise ValueError(
            f"{name} needs the current parameters: call tx.update(updates, state, params)."
        )
    layout = lay_out_geometry(geometry, params)
    found, treedef = flatten_with_holes(updates)
    if treedef != layout.treedef:
        raise ValueError(f"{name}: {_difference(layout, found, treedef)}")
    incoming = [update for _, update in found]
    pairs = []
    for index in layout.indices():
        path, param, update = layout.paths[index], layout.leaves[index], incoming[index]
        if is_hole(update):
            continue
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"{name}: the update of {path!r} has shape {jnp.shape(update)}, the parameter"
                f" {jnp.shape(param)}."
            )
        if not jnp.issubdtype(jnp.result_type(update), jnp.floating):
            raise TypeError(
                f"{name}: the update of {path!r} has dtype {jnp.result_type(update)}; give the"
                " gradient of a real floating point parameter."
            )
        if jnp.size(update):
            arrays = jnp.asarray(param), jnp.asarray(update)
            pairs.append(Pair(index, path, layout.values[index], *arrays))
        else:
            incoming[index] = jnp.zeros_like(param)
    return layout, incoming, pairs


def _difference(layout: Layout, found: list[tuple[Any, Any]], treedef: Any) -> str:
    updates = [path_string(path) for path, _ in found]
    missing = [path for path in layout.paths if path not in updates]
    extra = [path for path in updates if path not in layout.paths]
    if missing or extra:
        return (
            "updates and parameters are different trees: parameters without an update"
            f" {missing}, updates without a parameter {extra}."
        )
    return (
        "updates and parameters are trees of different containers:"
        f" {treedef} against {layout.treedef}."
    )


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _placeholder_type() -> type:
    """The stand-in for parameters with which optax finds them in a state."""
    seen = []

    def init(params):
        seen.append(type(params))
        return params

    optax.tree_utils.tree_map_params(init, lambda leaf: leaf, {})
    return seen[0]


_Placeholder = _placeholder_type()


def is_placeholder(params: Any) -> bool:
    """True where `optax.tree_utils.tree_map_params` asks for a state to look at."""
    return isinstance(params, _Placeholder)
