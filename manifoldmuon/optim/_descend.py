"""Fused step: direction, budget, learning rate and retraction in a single pass over leaves."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from manifoldmuon._internal.arguments import Rate, WeightDecay, checked
from manifoldmuon._internal.matrices.arrays import upcast
from manifoldmuon._internal.meshes.mesh import warn_of_unset_mesh
from manifoldmuon._internal.trees.paths import is_hole
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    gradient_transformation,
)
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._links import ScaleBySteepestState, init_steepest
from manifoldmuon.optim._plan import Plan, make_plan, plan_updates
from manifoldmuon.optim._start import refuse_far
from manifoldmuon.optim._transformation import budgets_by_weight, by_weight, init_state, merge
from manifoldmuon.optim.rules import Given, RuleResult, budget, direction, retraction


class DescendState(NamedTuple):
    """State of `descend`.

    Attributes:
      count: steps taken, int32; `()` unless the learning rate or the weight decay is a schedule.
      steepest: warm starts and gaps.
    """

    count: Any
    steepest: ScaleBySteepestState


@checked
def descend(
    learning_rate: Rate,
    geometry: Geometry,
    *,
    budgets: Budgets = 1.0,
    weight_decay: WeightDecay = None,
    track_gap: bool = True,
) -> Transformation:
    """Take the steepest step of a given length, as a fused chain.

    Equal up to rounding to `chain(scale_by_steepest(geometry), scale_by_budget(budgets),
    optax.add_decayed_weights(...), optax.scale_by_learning_rate(learning_rate),
    retract(geometry))`, with weight decay on unconstrained leaves only. Each leaf is rearranged,
    stacked and, on a mesh, moved only once, not twice.

    Args:
      learning_rate: a number or an Optax schedule.
      geometry: the manifold of each parameter; see `resolve_geometry`.
      budgets: shares of the learning rate per leaf; see `scale_by_budget`.
      weight_decay: decay rate of the unconstrained leaves, multiplied by the learning rate.
      track_gap: see `scale_by_steepest`.

    Returns:
      A transformation with a `DescendState`; it must come last. `update` needs `params`.
      `init` warns (`UserWarning`) if the initial learning rate, times a budget, is above 1 on a
      constrained manifold.

    Examples:
      >>> tx = optax.chain(optax.trace(0.9), descend(0.1, mm.manifolds.Stiefel()))
    """
    scheduled = callable(learning_rate) or callable(weight_decay)

    def init_fn(params: Any) -> DescendState:
        plan = make_plan(geometry, params)
        shares = find_budgets(budgets, params).values
        _warn_of_long_steps(learning_rate, plan, shares)
        refuse_far(geometry, params)
        warn_of_unset_mesh(params, stacklevel=4)
        start = functools.partial(init_steepest, track_gap)
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return DescendState(count, init_state(ScaleBySteepestState, start, plan, params))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        count, before = state
        rate, decay = (_at(count, value) for value in (learning_rate, weight_decay))
        plan = plan_updates("descend", geometry, updates, params)
        shares = find_budgets(budgets, params).values
        signed = budgets_by_weight(plan, params, shares, -rate, constrained)
        given = {p: x | signed.get(p, {}) for p, x in by_weight(plan, before).items()}
        trees = params, updates
        updates, results = execute("descend", plan, _step, trees, given, divide=True)
        leaves, points = plan.leaves(updates), plan.leaves(params)
        # Here, and not in the visit, the compiler fuses it with `apply_updates`.
        free = {w.index: shares[w.index] for w in plan.weights if not w.manifold.constrained}
        for i, share in free.items():
            if not (is_hole(leaves[i]) or is_hole(points[i])):
                step = rate * share * upcast(jnp.asarray(leaves[i]))
                if decay is not None:
                    step += rate * decay * upcast(jnp.asarray(points[i]))
                leaves[i] = -step.astype(leaves[i].dtype)
        updates = jax.tree.unflatten(plan.treedef, leaves)
        count = optax.safe_increment(count) if scheduled else ()
        return updates, DescendState(count, merge("descend", plan, before, results))

    def placeholder(params: Any) -> DescendState:
        zero = jnp.zeros(())
        steepest = ScaleBySteepestState(zero, zero, zero)  # type: ignore
        return DescendState(zero if scheduled else (), steepest)

    return gradient_transformation(update_fn, init_fn, placeholder, Terminal)


def _step(manifold: Manifold, point: jax.Array, update: jax.Array, given: Given) -> RuleResult:
    """Return the step of a constrained weight, and the direction of an unconstrained weight."""
    # Not `then(direction, budget, retraction)`: what is emitted at once is rounded at once.
    update, results = direction(manifold, point, update, given, rounded=not manifold.constrained)
    if not manifold.constrained:
        return update, results
    update, _ = budget(manifold, point, update, given)
    return retraction(manifold, point, update, given)[0], results


def _at(count: Any, value: Any) -> Any:
    """Return a number, or the value of a schedule at this count."""
    return value(count) if callable(value) else value


def _warn_of_long_steps(learning_rate: Any, plan: Plan, shares: Sequence[Any]) -> None:
    rate = _at(jnp.zeros((), jnp.int32), learning_rate)  # as Optax: a schedule may be of arrays
    factors = [shares[weight.index] for weight in plan.weights if weight.manifold.constrained]
    if any(isinstance(x, Tracer) for x in (rate, *factors)):
        return
    # Inside `jax.jit` a function of JAX arrays would trace them.
    longest = float(rate) * max([0.0, *(float(np.asarray(x).max(initial=0)) for x in factors)])
    if longest > 1:
        warnings.warn(
            f"a learning rate of {longest:g}, budgets included, turns constrained weights by more"
            " than a radian per step: rates from 0.02 to 0.2 are usual",
            stacklevel=4,
        )
