"""Hyperball: move weights at fixed norm with any Optax optimizer."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.arguments import Rate, checked, number
from manifoldmuon._internal.meshes.mesh import mesh_of
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    check_ascends,
    gradient_transformation,
)
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._keep_norms import KeepNormsState, Radius, init_radii
from manifoldmuon.optim._plan import plan_updates
from manifoldmuon.optim._transformation import budgets_by_weight, by_weight
from manifoldmuon.optim.rules import Rule, budget, keep_norm, on_sphere, rounded, then, unit


@checked
def hyperball(
    base: optax.GradientTransformation,
    learning_rate: Rate,
    geometry: Geometry,
    *,
    radial: Annotated[ArrayLike, number("[0, 1]")] = 1.0,
    radius: Radius = None,
    budgets: Budgets | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Move weights at fixed norm by the normalised updates of any optimizer: AdamH, MuonH.

    With the update $u$ of the base and the initial norm $R$ of the weight

    $$
    W \leftarrow R\,\operatorname{Norm}\bigl(W - \eta R\,\operatorname{Norm}(u)\bigr), \qquad
    \operatorname{Norm}(x) = \frac{x}{\|x\|_F}
    $$

    (Wen et al., "Hyperball Optimization", arXiv:2606.16899). It replaces weight decay, and the
    learning rate is the angle of a step, to first order.

    `adamh` and `muonh` are this with their bases. For tangent steps, steepest in the spectral
    norm, use the base `chain(optax.trace(0.95), scale_by_steepest(sphere))`, the geometry
    `sphere = Hypersphere(ndim=2, step_norm=Spectral())` and `radial=0`.

    The norm is fixed, so add a gain where the model needs it: `y = gain * (W @ x)`, with `gain` a
    scalar or vector that starts at 1 and is trained by Adam. Train biases, gains and embeddings
    with another optimizer, through `optim.hybrid` as in the example.

    Args:
      base: the transformation that computes the updates. It must ascend and have no learning rate,
        such as `optax.scale_by_adam()`; see `optim.normalize`.
      learning_rate: a number or an Optax schedule.
      geometry: a `Hypersphere` for each parameter that keeps its norm; see `keep_norms`.
        `Euclidean` leaves get the updates of the base, times the learning rate.
      radial: share of the radial part of `u` (its component along `W`) that is kept before
        normalisation: 1 is the published update, 0 a tangent step.
      radius: replaces the initial norms; see `keep_norms`.
      budgets: shares of the learning rate per leaf; see `optim.scale_by_budget`.

    Returns:
      A chain that ends in `keep_norms`, with the radii in its state. `update` needs `params`.
      Weights stay as they are for a zero update and, with `radial=0`, for an update with a tangent
      part that is only rounding.

    Raises:
      TypeError: on use; see `keep_norms`.
      ValueError: `radial` is outside [0, 1]; on `init`, the base descends; on use, see
        `keep_norms`.

    Examples:
      >>> params = {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.zeros((2, 4))}
      >>> geometry = {"kernel": mm.manifolds.Hypersphere(ndim=2).stacked(), "bias": None}
      >>> adamh = hyperball(optax.scale_by_adam(), 0.02, geometry)
      >>> tx = mm.optim.hybrid(adamh, geometry, optax.adam(1e-3))
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> jnp.linalg.norm(optax.apply_updates(params, updates)["kernel"], axis=(1, 2)).tolist()
      [4.0, 4.0]
    """
    move = functools.partial(unit, radial=radial)
    return norm_keeping("hyperball", base, None, move, learning_rate, geometry, radius, budgets)


def norm_keeping(
    name: str,
    base: optax.GradientTransformation,
    first: Rule | None,
    second: Rule,
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    radius: Radius,
    budgets: Budgets | None,
) -> Transformation:
    """Return a base and, in one visit, the rules `first`, `second`, `budget` and `keep_norm`.

    `first` needs whole matrices, or is None. On a mesh only updates move to the devices that apply
    it; the other rules, entry by entry, follow in a visit of their own, where the weights are.

    The state is that of the chain of the base, unit updates, `scale_by_budget` (with budgets),
    `optax.scale_by_learning_rate` and `keep_norms`.
    """
    base, rate = optax.with_extra_args_support(base), optax.scale_by_learning_rate(learning_rate)
    last = then(second, budget, keep_norm, rounded)
    firsts = [] if first is None else [first]
    whole, move = then(*firsts, last), then(*firsts, rounded)
    empty = [optax.EmptyState()] * (1 if budgets is None else 2)
    budgets = 1.0 if budgets is None else budgets

    def init_fn(params: Any) -> Any:
        check_ascends(name, base)
        before = base.init(params)
        find_budgets(budgets, params)
        return before, *empty, rate.init(params), init_radii(geometry, radius, params)

    def update_fn(updates, state, params=None, **extra_args):
        # Check shapes before the base optimizer, which would broadcast a wrong shape.
        plan = plan_updates(name, geometry, updates, params)
        before, *_, rates, radii = state
        updates, before = base.update(updates, before, params, **extra_args)
        factor, rates = rate.update(jnp.ones(()), rates)
        shares = find_budgets(budgets, params).values
        given = budgets_by_weight(plan, params, shares, factor)
        known = by_weight(plan, radii)
        given = {
            weight.path: given[weight.path] | known.get(weight.path, {})
            for weight in plan.weights
            if weight.path in known or not on_sphere(weight.manifold)
        }
        rule, stack = whole, first is not None
        if first is not None and any(mesh_of(x) is not None for x in jax.tree.leaves(params)):
            updates, _ = execute(name, plan, move, (params, updates), divide=True)
            rule, stack = last, False
        updates, _ = execute(name, plan, rule, (params, updates), given, stack=stack)
        return updates, (before, *empty, rates, radii)

    def placeholder(params: Any) -> Any:
        # A scalar for the dictionary of radii; see `gradient_transformation`.
        radii = KeepNormsState(jnp.zeros(()))  # type: ignore
        return base.init(params), *empty, rate.init(params), radii

    return gradient_transformation(update_fn, init_fn, placeholder, Terminal)
