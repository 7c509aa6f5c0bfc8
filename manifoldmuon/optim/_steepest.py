"""From a gradient to the steepest direction of its manifold, leaf by leaf."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._geometry import Geometry, lay_out_geometry
from manifoldmuon.optim._grouping import replicated_like, together
from manifoldmuon.optim._updates import is_placeholder, pair_up, wide


class ScaleBySteepestState(NamedTuple):
    """What one step leaves for the next, and what it has to show for itself.

    All three are dictionaries keyed by path (see `path_string`): none has the shape of the
    parameters, so `optax.tree_utils.tree_map_params` hands each of them whole to
    `transform_non_params`.

    Attributes:
      dual: warm starts of the solvers, for the leaves that have no closed form.
      residual: float32, one number per point: `Steepest.residual` of the last step.
      gap: float32, one number per point: `Steepest.gap` of the last step.
    """

    dual: dict[str, Any]
    residual: dict[str, jax.Array]
    gap: dict[str, jax.Array]


def scale_by_steepest(geometry: Geometry) -> optax.GradientTransformationExtraArgs:
    """Replaces each gradient by the steepest tangent direction at its parameter.

    The direction ascends and has norm at most 1 in the manifold's own norm, whatever the
    gradient's scale, so momentum goes before this link and the learning rate after it.
    Leaves of one manifold, shape, dtype and sharding are solved in one batched call.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.

    Returns:
      A transformation whose updates have the parameters' dtypes; the arithmetic is done in
      float32 or wider. Its state is a `ScaleBySteepestState`. `update` needs `params`.
      An array without entries gets an update without entries; `None`, `MaskedNode` and missing
      updates pass through. A NaN stays in its leaf, and does not enter the next warm start.

    Raises:
      TypeError: on use, for parameters that are not floating point.
      ValueError: on use, where geometry, parameters and updates do not fit, naming the path.
    """

    def init_fn(params: Any) -> ScaleBySteepestState:
        if is_placeholder(params):  # three leaves, none of them a parameter
            return ScaleBySteepestState(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))  # type: ignore
        layout = lay_out_geometry(geometry, params)
        state = ScaleBySteepestState({}, {}, {})
        for index in layout.indices():
            path, leaf, manifold = layout.paths[index], layout.leaves[index], layout.values[index]
            shape = jnp.shape(leaf)
            dual = manifold.init_dual(shape)
            if jax.tree.leaves(dual):
                state.dual[path] = replicated_like(dual, leaf)
            points = jax.eval_shape(manifold.norm, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
            # Two arrays, not one twice: a buffer cannot be donated twice.
            state.residual[path] = replicated_like(jnp.zeros(points, jnp.float32), leaf)
            state.gap[path] = replicated_like(jnp.zeros(points, jnp.float32), leaf)
        return state

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        layout, outgoing, pairs = pair_up(geometry, updates, params, "scale_by_steepest")
        strangers = [pair.path for pair in pairs if pair.path not in state.residual]
        if strangers:
            raise ValueError(
                f"scale_by_steepest: the state knows no parameters {strangers}; it was made for"
                " another tree. Call tx.init(params) again."
            )
        duals = [
            state.dual.get(pair.path, pair.manifold.init_dual(pair.param.shape)) for pair in pairs
        ]
        problems = [
            (pair.param, pair.update, dual) for pair, dual in zip(pairs, duals, strict=True)
        ]
        solved = together(_direction, [pair.manifold for pair in pairs], problems)
        dual, residual, gap = (dict(field) for field in state)
        for pair, (direction, (next_dual, next_residual, next_gap)) in zip(
            pairs, solved, strict=True
        ):
            outgoing[pair.index] = direction
            residual[pair.path], gap[pair.path] = next_residual, next_gap
            if pair.path in dual:
                dual[pair.path] = next_dual
        return layout.rebuild(outgoing), ScaleBySteepestState(dual, residual, gap)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _direction(manifold: Manifold, point: jax.Array, grad: jax.Array, dual: Any):
    start = wide(point)  # the gradient follows: its dtype must not decide the state's
    found = manifold.steepest(start, grad.astype(start.dtype), dual)
    next_dual = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(new), new, old).astype(old.dtype), found.dual, dual
    )
    certificate = found.residual.astype(jnp.float32), found.gap.astype(jnp.float32)
    return found.direction.astype(point.dtype), (next_dual, *certificate)
