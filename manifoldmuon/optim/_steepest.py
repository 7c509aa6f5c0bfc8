"""From gradients to steepest directions, of each leaf by itself or of the whole tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon._internal.arrays import expand_trailing, inner_product, upcast
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import Combination, Max
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import (
    Leaf,
    LikePoint,
    batched,
    is_placeholder,
    pair_up,
    replicated_like,
)
from manifoldmuon.optim._owners import divided_alike


class ScaleBySteepestState(NamedTuple):
    """State carried between steps: warm starts and certificates.

    All three are dictionaries keyed by path (see `path_string`): none has the shape of the
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
    """Replaces each gradient by the steepest tangent direction at its parameter.

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

    Raises:
      TypeError: on use, for parameters that are not floating point.
      ValueError: on use, where geometry, parameters and updates do not fit, naming the path.
    """

    def init_fn(params: Any) -> ScaleBySteepestState:
        if is_placeholder(params):  # three leaves, none of them a parameter
            return ScaleBySteepestState(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))  # type: ignore
        places = find_manifolds(geometry, params)
        leaves = places.leaves(params)
        state = ScaleBySteepestState({}, {}, {})
        for place in places.real:
            path, entry, leaf = places.paths[place], places.values[place], leaves[place]
            manifold, shape = manifold_of(entry), inner_shape(entry, jnp.shape(leaf))
            dual = manifold.init_dual(shape)
            if jax.tree.leaves(dual):
                state.dual[path] = replicated_like(dual, leaf)
            points = shape[: len(shape) - manifold.ndim]
            if not certify:
                continue
            # Two arrays, not one twice: a buffer cannot be donated twice.
            state.residual[path] = replicated_like(jnp.zeros(points, jnp.float32), leaf)
            state.gap[path] = replicated_like(jnp.zeros(points, jnp.float32), leaf)
        return state

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        paired = pair_up(geometry, updates, params, "scale_by_steepest")
        duals = [_dual_of(state, leaf) for leaf in paired.leaves]
        unknown = [
            leaf.path
            for leaf, dual in zip(paired.leaves, duals, strict=True)
            if (certify and leaf.path not in state.residual)
            or (jax.tree.leaves(dual) and leaf.path not in state.dual)
        ]
        if unknown:
            raise ValueError(
                f"scale_by_steepest: the state knows no parameters {unknown}; it was made for"
                " another tree. Call tx.init(params) again."
            )
        arguments = [
            # Otherwise what comes before this link would be divided as it suits the solvers.
            (LikePoint(leaf.param), LikePoint(divided_alike(leaf.update, leaf.param)), dual)
            for leaf, dual in zip(paired.leaves, duals, strict=True)
        ]
        entries = [leaf.entry for leaf in paired.leaves]
        found = batched(_direction, entries, arguments, divide=True)
        by_path = dict(zip([leaf.path for leaf in paired.leaves], found, strict=True))
        dual = {path: by_path[path].dual for path in by_path.keys() & state.dual.keys()}
        shown = by_path if certify else {}
        residual = {path: answer.residual for path, answer in shown.items()}
        gap = {path: answer.gap for path, answer in shown.items()}
        after = ScaleBySteepestState(state.dual | dual, state.residual | residual, state.gap | gap)
        return paired.filled([answer.direction for answer in found]), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _dual_of(state: ScaleBySteepestState, leaf: Leaf) -> Any:
    """Return the dual variables of the last step, or those of a cold start."""
    if leaf.path in state.dual:
        return state.dual[leaf.path]
    return manifold_of(leaf.entry).init_dual(inner_shape(leaf.entry, leaf.param.shape))


def _direction(manifold: Manifold, point: jax.Array, grad: jax.Array, dual: Any) -> Any:
    start = upcast(point)  # the gradient follows: its dtype must not decide the state's
    found = manifold.steepest(start, grad.astype(start.dtype), dual)
    next_dual = jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(new), new, old).astype(old.dtype), found.dual, dual
    )
    return found._replace(
        direction=LikePoint(found.direction.astype(point.dtype)),
        dual=next_dual,
        residual=found.residual.astype(jnp.float32),
        gap=found.gap.astype(jnp.float32),
    )


def monitor(state: Any) -> dict[str, dict[str, jax.Array]]:
    """The last step's certificates, wherever in an optimizer state they are.

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
    """Replaces gradients by the steepest step of norm 1 in the norm of the whole tree.

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

    Raises:
      TypeError: on use; see `resolve` and `scale_by_budget`.
      ValueError: on use; see `resolve` and `scale_by_budget`.
    """
    steepest, shares = scale_by_steepest(geometry, certify), scale_by_budget(budgets)

    def init_fn(params: Any) -> Any:
        shares.init(params)
        return steepest.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        directions, state = steepest.update(updates, state, params, **extra_args)
        directions, _ = shares.update(directions, optax.EmptyState())
        grads = pair_up(geometry, updates, params, "scale_by_duality").leaves
        steps = pair_up(geometry, directions, params, "scale_by_duality")
        if not steps.leaves:
            return directions, state
        entries = [leaf.entry for leaf in steps.leaves]
        pairs = zip(steps.leaves, grads, strict=True)
        marked = [(LikePoint(step.update), LikePoint(grad.update)) for step, grad in pairs]
        given = _combine(combination, batched(_gain, entries, marked))
        pairs = zip(steps.leaves, given, strict=True)
        shared = [(LikePoint(step.update), numbers) for step, numbers in pairs]
        moved = batched(_multiply, entries, shared)
        return steps.filled(moved), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _gain(manifold: Manifold, step: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`<grad, step>` of every point, as numbers of moderate size and powers of two."""
    scaled, exponent = scale_to_unit_exponent(grad, manifold.ndim)
    return jnp.maximum(inner_product(scaled, step, manifold.ndim), 0), exponent


def _combine(combination: Combination, gains: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Return the share of every point, from the gains of all points on one scale."""
    scales = [jnp.where(size > 0, power, -(2**20)).ravel() for size, power in gains]
    largest = jnp.max(jnp.concatenate(scales))
    # Not above 0: the exponent of a leaf of zeros means nothing.
    sizes = [times_power_of_two(d, jnp.minimum(power - largest, 0)) for d, power in gains]
    given = combination.dualize(jnp.concatenate([size.ravel() for size in sizes]))
    ends = np.cumsum([size.size for size in sizes])[:-1]
    parts = jnp.split(given, ends)
    return [part.reshape(size.shape) for part, size in zip(parts, sizes, strict=True)]


def _multiply(manifold: Manifold, step: jax.Array, given: jax.Array) -> LikePoint:
    return LikePoint(step * expand_trailing(given, manifold.ndim).astype(step.dtype))
