"""From gradients to steepest directions, of each leaf by itself or of the whole tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon._internal.arrays import expand_trailing, inner_product, upcast
from manifoldmuon._internal.links import init_by_path, link
from manifoldmuon._internal.mesh import divided_alike, warn_of_unset_mesh
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import Combination, Max
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Entry, Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import map_leaves


class ScaleBySteepestState(NamedTuple):
    """State carried between steps: warm starts and certificates.

    All three are dictionaries keyed by path such as `layer/kernel`: none has the shape of the
    parameters, so `optax.tree_utils.tree_map_params` hands each of them whole to
    `transform_non_params`.

    Attributes:
      dual: warm starts of the solvers, for the leaves that have no closed form.
      residual: float32, one number per point: `Steepest.residual` of the last step; empty without
        `certify`.
      gap: float32, one number per point: `Steepest.gap` of the last step; likewise.
    """

    dual: dict[str, Any]
    residual: dict[str, jax.Array]
    gap: dict[str, jax.Array]


@checked()
def scale_by_steepest(
    geometry: Geometry, certify: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Replace each gradient by the steepest tangent direction at its parameter.

    The direction ascends and has norm at most 1 in the manifold's norm, whatever the
    gradient's scale, so momentum goes before this link and the learning rate after it.
    Leaves of one manifold, shape, dtype and sharding are solved in one batched call.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      certify: whether residuals and gaps are kept in the state, for `monitor`. What is not kept is
        not computed under `jax.jit`: on unconstrained leaves that saves two large products.

    Returns:
      A transformation whose updates have the parameters' dtypes; the arithmetic is done in
      float32 or wider. Its state is a `ScaleBySteepestState`. `update` needs `params`.
      An array without entries gets an update without entries; `None`, `MaskedNode` and missing
      updates pass through. A NaN stays in its leaf, and does not enter the next warm start.

    Examples:
      >>> tx, params = scale_by_steepest(mm.manifolds.Hypersphere()), jnp.array([1.0, 0.0])
      >>> updates, state = tx.update(jnp.array([5.0, 2.0]), tx.init(params), params)
      >>> updates.tolist()
      [0.0, 1.0]
    """

    def init_fn(params: Any) -> ScaleBySteepestState:
        places = find_manifolds(geometry, params)
        warn_of_unset_mesh(params, stacklevel=4)
        # Two arrays, not one twice: a buffer cannot be donated twice.
        numbers = [init_by_path(places, params, _zeros) if certify else {} for _ in range(2)]
        return ScaleBySteepestState(init_by_path(places, params, _init_dual), *numbers)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        # Otherwise what comes before this link would be divided as it suits the solvers.
        updates = divided_alike(updates, params)
        updates, found = map_leaves(
            direction_at,
            geometry,
            updates,
            params,
            name="scale_by_steepest",
            carried=state.dual,
            divide=True,
        )
        return updates, keep_found(state, found, certify)

    zero = jnp.zeros(())
    # The placeholder has a number for each dictionary; see `link`.
    return link(update_fn, init_fn, lambda _: ScaleBySteepestState(zero, zero, zero))  # type: ignore


def _init_dual(entry: Entry, shape: tuple[int, ...]) -> Any:
    return manifold_of(entry).init_dual(inner_shape(entry, shape))


def _zeros(entry: Entry, shape: tuple[int, ...]) -> jax.Array:
    """Return a zero for every point."""
    inner = inner_shape(entry, shape)
    return jnp.zeros(inner[: len(inner) - manifold_of(entry).ndim], jnp.float32)


def keep_found(
    state: ScaleBySteepestState, found: dict[str, Any], certify: bool
) -> ScaleBySteepestState:
    """Return the next state; parameters without an update keep what they have."""
    kept = [old | {path: x[i] for path, x in found.items()} for i, old in enumerate(state)]
    return ScaleBySteepestState(kept[0], *(kept[1:] if certify else state[1:]))


def direction_at(manifold: Manifold, point: jax.Array, grad: jax.Array, dual: Any) -> Any:
    """Return the direction in the dtype of the point, with warm start and certificate."""
    start = upcast(point)  # the gradient follows: its dtype must not decide the state's
    found = manifold.steepest(start, grad.astype(start.dtype), dual)
    next_dual = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(new), new, old).astype(old.dtype), found.dual, dual
    )
    numbers = found.residual.astype(jnp.float32), found.gap.astype(jnp.float32)
    return found.direction.astype(point.dtype), (next_dual, *numbers)


def monitor(state: Any) -> dict[str, dict[str, jax.Array]]:
    """Return the last step's certificates, wherever in an optimizer state they are.

    Works on the state of any composition (chains, `optax.masked`, `optax.partition`,
    `optax.MultiSteps`, ...), and under `jax.jit`. See `monitor_distance` for the distance of the
    parameters from their manifolds.

    Args:
      state: an optimizer state with one `scale_by_steepest` in it, or several that share out
        the parameters; of Flax, the `opt_state` of an `nnx.Optimizer`.

    Returns:
      `{"residual": {path: array}, "gap": {path: array}}`: float32, one number per point; see
      `manifoldmuon.manifolds.solvers.Steepest`. Empty where nothing is certified, as in `muon`.

    Raises:
      ValueError: if there is no `ScaleBySteepestState`, or two speak of the same parameter.

    Examples:
      >>> tx, params = manifold_muon(0.1, mm.manifolds.Hypersphere()), {"w": jnp.array([1.0, 0.0])}
      >>> monitor(tx.init(params))["gap"]["w"].item()
      0.0
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ScaleBySteepestState))
    found = [node for node in nodes if isinstance(node, ScaleBySteepestState)]
    if not found:
        raise ValueError("there is no scale_by_steepest in the transformation of this state.")
    report: dict[str, dict[str, jax.Array]] = {"residual": {}, "gap": {}}
    for part in found:
        twice = report["gap"].keys() & part.gap.keys()
        if twice:
            raise ValueError(f"two scale_by_steepest report on {sorted(twice)}; ask each state.")
        # Flax keeps every array of an optimizer's state in a box.
        for name in report:
            pairs = getattr(part, name).items()
            report[name].update({path: jax.tree.leaves(boxed)[0] for path, boxed in pairs})
    return report


@checked()
def scale_by_duality(
    geometry: Geometry,
    budgets: Budgets = 1.0,
    combination: Combination = Max(),
    certify: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Replace gradients by the steepest step of norm 1 in the norm of the whole tree.

    That norm is `combine_k ||w_k|| / b_k` over the layers. A layer is one point of its manifold:
    each copy in a stack counts by itself, and so does each tap of a kernel whose taps are the
    points (`Stiefel`; under `Euclidean(ConvRMSToRMS())` the kernel is one point). The dual norm
    of a layer is `<gradient, steepest direction>`, on constrained manifolds over tangent
    directions. With `Max()` this is `scale_by_steepest` followed by `scale_by_budget`.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      budgets: the `b_k`; see `scale_by_budget`. A layer of budget 0 is frozen.
      combination: how norms combine: `Max()`, `Sum()` or `RootSumSquares()`.
      certify: see `scale_by_steepest`.

    Returns:
      A transformation with the state and the dtypes of `scale_by_steepest`; `update` needs
      `params`. Zeros give zeros. Where layers depend on one another, so do their NaNs.

    Examples:
      >>> tx = scale_by_duality(mm.manifolds.Euclidean(), combination=mm.norms.RootSumSquares())
      >>> grads = {"a": jnp.full(1, 3.0), "b": jnp.full(1, 4.0)}
      >>> tx.update(grads, tx.init(grads), grads)[0]["b"].round(3).item()
      0.8...
    """
    steepest, shares = scale_by_steepest(geometry, certify), scale_by_budget(budgets)

    def init_fn(params: Any) -> Any:
        shares.init(params)
        return steepest.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        grads = updates
        updates, state = steepest.update(updates, state, params, **extra_args)
        updates, _ = shares.update(updates, optax.EmptyState())
        _, gains = map_leaves(_gain, geometry, updates, params, grads, name="scale_by_duality")
        if gains:
            given = _combine(combination, gains)
            updates, _ = map_leaves(_multiply, geometry, updates, params, carried=given)
        return updates, state

    return link(update_fn, init_fn, steepest.init)


def _gain(manifold: Manifold, point: jax.Array, step: jax.Array, grad: jax.Array) -> Any:
    """Return `<grad, step>` of every point, as numbers of moderate size and powers of two."""
    scaled, exponent = scale_to_unit_exponent(grad, manifold.ndim)
    return None, (jnp.maximum(inner_product(scaled, step, manifold.ndim), 0), exponent)


def _combine(combination: Combination, gains: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the share of every point, from the gains of all points on one scale."""
    scales = [jnp.where(size > 0, power, -(2**20)).ravel() for size, power in gains.values()]
    largest = jnp.max(jnp.concatenate(scales))
    # Not above 0: the exponent of a leaf of zeros means nothing.
    sizes = [times_power_of_two(d, jnp.minimum(e - largest, 0)) for d, e in gains.values()]
    given = combination.dualize(jnp.concatenate([size.ravel() for size in sizes]))
    parts = jnp.split(given, np.cumsum([size.size for size in sizes])[:-1])
    return {k: p.reshape(s.shape) for k, p, s in zip(gains, parts, sizes, strict=True)}


def _multiply(manifold: Manifold, point: jax.Array, step: jax.Array, given: jax.Array) -> jax.Array:
    return step * expand_trailing(given, manifold.ndim).astype(step.dtype)
