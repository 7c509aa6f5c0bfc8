"""Fused step: direction, budget, learning rate and retraction in a single pass over leaves."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from manifoldmuon._internal.matrices.arrays import expand_trailing, upcast
from manifoldmuon._internal.trees.places import Places
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    difference,
    transformation,
)
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._geometry import Entry, Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import map_leaves
from manifoldmuon.optim._retract import retract
from manifoldmuon.optim._steepest import (
    ScaleBySteepestState,
    direction_at,
    keep_found,
    scale_by_steepest,
)


class DescendState(NamedTuple):
    """State of `descend`.

    Attributes:
      count: steps taken, int32; `()` unless the learning rate or the weight decay is a schedule.
      steepest: warm starts and gaps.
    """

    count: Any
    steepest: ScaleBySteepestState


@checked()
def descend(
    learning_rate: optax.ScalarOrSchedule,
    geometry: Geometry,
    *,
    budgets: Budgets = 1.0,
    weight_decay: optax.ScalarOrSchedule | None = None,
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
    last = retract(geometry)
    steepest: Any = scale_by_steepest(geometry, track_gap)
    scheduled = callable(learning_rate) or callable(weight_decay)

    def init_fn(params: Any) -> DescendState:
        _warn_of_long_steps(learning_rate, find_budgets(budgets, params), geometry, params)
        last.init(params)
        count = jnp.zeros((), jnp.int32) if scheduled else ()
        return DescendState(count, steepest.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        count, before = state
        rate, decay = (_at(count, value) for value in (learning_rate, weight_decay))
        places, listed = find_manifolds(geometry, params), find_budgets(budgets, params)
        points, whole = places.leaves(params), places.spread(listed.values)
        shares = {places.paths[i]: rate * whole[i] for i in places.real if whole[i] is not None}
        carried = {}
        for i in places.real:
            path, entry = places.paths[i], places.values[i]
            if path in shares and path in before.dual:
                length = _lengths(shares[path], entry, jnp.shape(points[i]))
                carried[path] = before.dual[path], length
        updates, found = map_leaves(
            _step,
            geometry,
            updates,
            params,
            name="descend",
            carried=carried,
            divide=True,
        )
        leaves = places.leaves(updates)
        for i in places.real:
            if places.paths[i] in found and not manifold_of(places.values[i]).constrained:
                step = shares[places.paths[i]] * upcast(leaves[i])
                if decay is not None:
                    step += rate * decay * upcast(jnp.asarray(points[i]))
                leaves[i] = -step.astype(leaves[i].dtype)
        updates = places.unflatten(leaves, params)
        count = optax.safe_increment(count) if scheduled else ()
        return updates, DescendState(count, keep_found(before, found, track_gap))

    def placeholder(params: Any) -> DescendState:
        return DescendState(jnp.zeros(()) if scheduled else (), steepest.init(params))

    return transformation(update_fn, init_fn, placeholder, Terminal)


def _at(count: Any, value: Any) -> Any:
    """Return a number, or the value of a schedule at this count."""
    return value(count) if callable(value) else value


def _warn_of_long_steps(
    learning_rate: Any, budgets: Places, geometry: Geometry, params: Any
) -> None:
    rate = _at(jnp.zeros((), jnp.int32), learning_rate)  # as Optax: a schedule may be of arrays
    places = find_manifolds(geometry, params)
    shares = places.spread(budgets.values)
    factors = [shares[i] for i in places.real if manifold_of(places.values[i]).constrained]
    if any(isinstance(x, Tracer) for x in (rate, *factors)):
        return
    # Inside `jax.jit` a function of JAX arrays would trace them.
    longest = float(rate) * max([0.0, *(float(np.asarray(x).max(initial=0)) for x in factors)])
    if longest > 1:
        warnings.warn(
            f"a learning rate of {longest:g}, budgets included, turns constrained weights by more"
            " than one radian a step: rates from 0.02 to 0.2 are usual",
            stacklevel=4,
        )


def _lengths(share: Any, entry: Entry, shape: tuple[int, ...]) -> Any:
    """Return the step length of each point, in the manifold's layout; `()` if unconstrained."""
    manifold = manifold_of(entry)
    if not manifold.constrained:
        return ()
    if jnp.ndim(share):
        share = jnp.broadcast_to(share, shape)
        return entry.layout.inward(share) if isinstance(entry, LaidOut) else share
    inner = inner_shape(entry, shape)
    return jnp.full(inner[: len(inner) - manifold.ndim], share)


def _step(manifold: Manifold, point: jax.Array, grad: jax.Array, carried: Any) -> Any:
    """Return the update of a constrained leaf, or the direction of an unconstrained leaf."""
    dual, length = carried
    if not manifold.constrained:
        return direction_at(manifold, point, grad, dual, rounded=True)
    direction, numbers = direction_at(manifold, point, grad, dual)
    if length.ndim < direction.ndim:
        length = expand_trailing(length, manifold.ndim)
    moved = manifold.retract(upcast(point), -length.astype(direction.dtype) * direction)
    return difference(moved, point), numbers
