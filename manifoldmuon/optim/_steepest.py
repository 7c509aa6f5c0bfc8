"""Replace gradients by steepest directions, leaf by leaf."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.matrices.arrays import upcast
from manifoldmuon._internal.meshes.alike import shard_alike
from manifoldmuon._internal.meshes.mesh import warn_of_unset_mesh
from manifoldmuon._internal.trees.transformations import init_by_path, transformation
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Entry, Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import map_leaves


class ScaleBySteepestState(NamedTuple):
    """State carried between steps: warm starts and gaps.

    All attributes are dictionaries keyed by path such as `layer/kernel`, without the shape of the
    parameters: `optax.tree_utils.tree_map_params` passes each dictionary whole to
    `transform_non_params`.

    Attributes:
      dual: warm starts of the solvers, for leaves without a closed form.
      residual: `Steepest.residual` of the last step, a float32 number per point; empty without
        `track_gap`.
      gap: `Steepest.gap` of the last step, a float32 number per point; empty without `track_gap`.
    """

    dual: dict[str, Any]
    residual: dict[str, jax.Array]
    gap: dict[str, jax.Array]


@checked()
def scale_by_steepest(
    geometry: Geometry, track_gap: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Replace each gradient by the steepest tangent direction at its parameter.

    The direction ascends and has norm at most 1 in the manifold's norm, whatever the gradient's
    scale, so momentum goes before and the learning rate after. Leaves with the same manifold,
    shape, dtype and sharding are solved in a single batched call.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      track_gap: whether to keep residuals and gaps in the state, for `monitor`. Without it
        `jax.jit` drops their computation, which saves two large products on unconstrained leaves.

    Returns:
      A transformation with a `ScaleBySteepestState`. Updates have the parameters' dtypes; the
      arithmetic is done in float32 or wider. `update` needs `params`. An array without entries
      gets an update without entries; `MaskedNode` and `None` in place of parameters pass through.
      A NaN stays in its leaf, and does not enter the next warm start.

    Examples:
      >>> tx, params = scale_by_steepest(mm.manifolds.Hypersphere()), jnp.array([1.0, 0.0])
      >>> updates, state = tx.update(jnp.array([5.0, 2.0]), tx.init(params), params)
      >>> updates.tolist()
      [0.0, 1.0]
    """

    def init_fn(params: Any) -> ScaleBySteepestState:
        places = find_manifolds(geometry, params)
        warn_of_unset_mesh(params, stacklevel=4)
        # Make two arrays: the same buffer cannot be donated twice.
        numbers = [init_by_path(places, params, _zeros) if track_gap else {} for _ in range(2)]
        return ScaleBySteepestState(init_by_path(places, params, _init_dual), *numbers)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        updates, found = map_leaves(
            functools.partial(direction_at, rounded=True),
            geometry,
            updates,
            params,
            name="scale_by_steepest",
            carried=state.dual,
            divide=True,
        )
        return updates, keep_found(state, found, track_gap)

    zero = jnp.zeros(())
    # One scalar per dictionary keyed by path; see `transformation`.
    return transformation(update_fn, init_fn, lambda _: ScaleBySteepestState(zero, zero, zero))  # type: ignore


def _init_dual(entry: Entry, shape: tuple[int, ...]) -> Any:
    return manifold_of(entry).init_dual(inner_shape(entry, shape))


def _zeros(entry: Entry, shape: tuple[int, ...]) -> jax.Array:
    """Return a zero for every point."""
    inner = inner_shape(entry, shape)
    return jnp.zeros(inner[: len(inner) - manifold_of(entry).ndim], jnp.float32)


def keep_found(
    state: ScaleBySteepestState, found: dict[str, Any], track_gap: bool
) -> ScaleBySteepestState:
    """Return the next state; parameters without an update keep their values."""
    kept = [
        old | {path: shard_alike(x[i], old[path]) for path, x in found.items() if path in old}
        for i, old in enumerate(state)
    ]
    return ScaleBySteepestState(kept[0], *(kept[1:] if track_gap else state[1:]))


def direction_at(
    manifold: Manifold, point: jax.Array, grad: jax.Array, dual: Any, rounded: bool = False
) -> Any:
    """Return the direction in float32 or wider, with warm start, residual and gap.

    The manifold gets the point in its own dtype, which decides how much of a gradient is rounding.
    With `rounded` the direction has that dtype, too.
    """
    wide = grad.astype(upcast(point).dtype)  # its dtype must not change the state's dtype
    found = manifold.steepest(point, wide, dual)
    if rounded:
        found = found.rounded(point.dtype, wide, manifold.factor_ndim)
    next_dual = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(new), new, old).astype(old.dtype), found.dual, dual
    )
    numbers = found.residual.astype(jnp.float32), found.gap.astype(jnp.float32)
    return found.direction, (next_dual, *numbers)


def monitor(state: Any) -> dict[str, dict[str, jax.Array]]:
    """Return the last step's residuals and gaps, found anywhere in an optimizer state.

    Works on the state of any composition (chains, `optax.masked`, `optax.partition`,
    `optax.MultiSteps`, ...), and under `jax.jit`. See `monitor_distance` for the distance of the
    parameters from their manifolds.

    Args:
      state: an optimizer state with a `scale_by_steepest`, or several for different parameters;
        for Flax, the `opt_state` of an `nnx.Optimizer`.

    Returns:
      `{"residual": {path: array}, "gap": {path: array}}`: a float32 number per point; see
      `manifoldmuon.manifolds.solvers.Steepest`. Empty without `track_gap`, as in `muon`.

    Raises:
      ValueError: there is no `ScaleBySteepestState`, or two report on the same parameter.

    Examples:
      >>> tx, params = manifold_muon(0.1, mm.manifolds.Hypersphere()), {"w": jnp.array([1.0, 0.0])}
      >>> monitor(tx.init(params))["gap"]["w"].item()
      0.0
    """
    residual, gap = (find_in(state, ScaleBySteepestState, name) for name in ("residual", "gap"))
    if residual is None or gap is None:
        raise ValueError("there is no scale_by_steepest in the transformation of this state.")
    return {"residual": residual, "gap": gap}


def find_in(state: Any, kind: type, field: str) -> dict[str, jax.Array] | None:
    """Return a field by path, from all states of a type in an optimizer state; None without any.

    Raises:
      ValueError: two states have the same parameter.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    found = [getattr(node, field) for node in nodes if isinstance(node, kind)]
    report: dict[str, jax.Array] = {}
    for part in found:
        if twice := report.keys() & part.keys():
            raise ValueError(f"two {kind.__name__} report on {sorted(twice)}; ask each state.")
        # Flax boxes every array of an optimizer's state.
        report.update({path: jax.tree.leaves(boxed)[0] for path, boxed in part.items()})
    return report if found else None
