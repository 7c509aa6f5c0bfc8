"""Master copies: float32 steps for low-precision parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from manifoldmuon._internal.arguments import checked
from manifoldmuon._internal.trees.paths import is_hole
from manifoldmuon._internal.trees.transformations import Terminal, difference, require_arguments


class MasterCopiesState(NamedTuple):
    """State of `with_master_copies`: the copies and the inner state.

    Attributes:
      copies: a tree like the parameters, with their shardings.
      inner: the wrapped transformation's state.
    """

    copies: Any
    inner: Any


@checked
def with_master_copies(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Keep a copy of the parameters in float32 and take every step on it.

    Use it for bfloat16 parameters: their relative rounding error, up to 1/256, swallows small steps
    and takes points off their manifolds. The copies stay on their manifolds up to rounding in their
    own dtype, and after every step the parameters are the rounded copies (Micikevicius et al.,
    Mixed precision training, arXiv:1710.03740, sec. 3.1).

    It wraps a complete optimizer and must be the last transformation:
    `with_master_copies(manifold_muon(0.02, g))`. The next step undoes any other change of the
    parameters, since copies are not read from the parameters again; after such a change call
    `init` again, or replace the copies in the state.

    Args:
      inner: the optimizer; it sees copies in place of parameters, and gradients in their dtype.
      dtype: dtype of the copies; a wider parameter keeps its own dtype.

    Returns:
      A transformation with a `MasterCopiesState`. Updates have the parameters' dtypes, rounded so
      that `W + u` is next to the rounded copy, and equal to it wherever the entry changes by less
      than a factor of two. `monitor_distance(geometry, params, state)` measures the copies.
      `update` needs `params`.

    Examples:
      >>> tx = with_master_copies(manifold_muon(0.02, mm.manifolds.Stiefel()))
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> MasterCopiesState:
        copies = jax.tree.map(lambda x: _copy(x, dtype), params)
        return MasterCopiesState(copies, inner.init(copies))

    def update_fn(updates, state, params=None, **extra_args):
        require_arguments("with_master_copies", params=params)
        grads = jax.tree.map(lambda x: _cast(x, dtype), updates)
        steps, inner_state = inner.update(grads, state.inner, state.copies, **extra_args)

        def take(step, copy):
            return copy if is_hole(step) else (copy + step).astype(copy.dtype)

        def move(step, copy, param):
            if is_hole(step) or not _is_floating(param):
                return step
            return difference(copy, jnp.asarray(param))

        copies = jax.tree.map(take, steps, state.copies, is_leaf=is_hole)
        updates = jax.tree.map(move, steps, copies, params, is_leaf=is_hole)
        return updates, MasterCopiesState(copies, inner_state)

    return Terminal(init_fn, update_fn)


def _copy(x: Any, dtype: DTypeLike) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, _wider(x, dtype), sharding=x.sharding)
    return _cast(jnp.copy(x), dtype)  # the same buffer cannot be donated twice


def _cast(x: Any, dtype: DTypeLike) -> Any:
    return jnp.asarray(x, _wider(x, dtype)) if _is_floating(x) else x


def _wider(x: Any, dtype: DTypeLike) -> Any:
    """Return the wider of two dtypes: a copy never has fewer bits than its parameter."""
    own = jnp.result_type(x)
    return jnp.promote_types(own, dtype) if _is_floating(x) else own


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
