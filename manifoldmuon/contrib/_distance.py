"""A learning rate from a lower bound on the distance to the optimum."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.arguments import check_arguments, number
from manifoldmuon._internal.arrays import nonzero_or_one
from manifoldmuon._internal.links import require
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.paths import is_hole
from manifoldmuon.contrib._rule import inner, scaled
from manifoldmuon.optim import Budgets, Geometry, chain, scale_by_budget, scale_by_steepest


class ScaleByDistanceState(NamedTuple):
    """State of `scale_by_distance`: the parts of its bound.

    Attributes:
      distance: the bound so far; float32.
      learning_rate: the length of the last step; float32.
      count: how many steps were taken.
      gained: the sum of `h * <gradient, start - weights>`, `h` being the length that a step would
        have without what the bound learns from it; float32.
      start: the weights before the first step.
      total: the sum of `h * gradient`; float32 or wider.
      dual: the state of the transformation that measures `total` in the dual norm.
    """

    distance: Float[Array, ""]
    learning_rate: Float[Array, ""]
    count: Int[Array, ""]
    gained: Float[Array, ""]
    start: Any
    total: Any
    dual: Any


@check_arguments(first=number("(0, inf)"))
def scale_by_distance(
    geometry: Geometry, budgets: Budgets = 1.0, first: ArrayLike = 1e-2
) -> optax.GradientTransformationExtraArgs:
    """Scale updates by minus an estimated distance over the root of the step count.

    It takes the place of `optax.scale_by_learning_rate`, and flips the sign as that does.

    Directions of norm 1 with steps `D / sqrt(t)` are the classical choice if `D`, the distance
    from the start to the optimum, is known. D-Adaptation (arXiv:2301.07733) and Prodigy
    (arXiv:2306.06101) bound it from below while training: for a convex loss and step lengths
    `h_i`,

    `D >= sum_i h_i <g_i, w_0 - w_i> / |sum_i h_i g_i|_dual`.

    Here the norm is the modular one of `geometry` and `budgets`, whose dual norm is the slope
    along its own steepest direction. On constrained manifolds and for other losses the bound is a
    heuristic.

    Every step costs one more steepest direction for each leaf, and the state holds two more
    copies of the weights. `update` takes `grad` as Optax's line searches do:
    `tx.update(grads, state, params, grad=grads)`; it may differ from `grads` behind momentum. A
    NaN enters the sums and stays there: wrap the chain in `optax.apply_if_finite`.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      budgets: what `scale_by_budget` was given.
      first: initial distance estimate; must underestimate the true one. Steps of modular norm 1
        are a natural unit, of which the default is a hundredth; much smaller ones cost steps.

    Returns:
      A transformation that flips the sign, whose state is a `ScaleByDistanceState`.

    Raises:
      ValueError: on use, without `params` or `grad`.

    Examples:
      >>> g = mm.manifolds.Hypersphere()
      >>> links = mm.optim.scale_by_steepest(g), scale_by_distance(g), mm.optim.retract(g)
      >>> tx = mm.optim.chain(*links)
    """
    steepest = chain(scale_by_steepest(geometry), scale_by_budget(budgets))

    def init_fn(params: Any) -> ScaleByDistanceState:
        def zero():  # an array of its own each time: a buffer cannot be donated twice
            return jnp.zeros((), jnp.float32)

        begin = jnp.asarray(first, jnp.float32) + zero()
        start = jax.tree.map(jnp.zeros_like, params)  # filled by the first step
        count = jnp.zeros((), jnp.int32)
        dual = steepest.init(params)
        state = begin, zero(), count, zero(), start, _wide_zeros(params), dual
        return match_varying_axes(ScaleByDistanceState(*state), params)

    def update_fn(updates, state, params=None, *, grad=None, **extra_args):
        del extra_args
        require("scale_by_distance", params=params, grad=grad)
        begun = state.count > 0
        start = jax.tree.map(lambda old, now: jnp.where(begun, old, now), state.start, params)
        back = jax.tree.map(jnp.subtract, start, params)
        root = jnp.sqrt(state.count + 1.0)
        weight = state.distance / root
        gained = state.gained + weight * inner(grad, back)
        total = _add(state.total, grad, weight)
        direction, dual = steepest.update(total, state.dual, params)
        size = inner(total, direction)
        bound = jnp.where(size == 0, 0.0, gained / nonzero_or_one(size))
        distance = jnp.maximum(state.distance, bound)
        rate = distance / root
        count = jnp.asarray(optax.safe_increment(state.count))
        after = ScaleByDistanceState(distance, rate, count, gained, start, total, dual)
        return scaled(updates, -rate), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _wide_zeros(params: Any) -> Any:
    def zeros(x):
        return jnp.zeros(jnp.shape(x), jnp.promote_types(jnp.result_type(x), jnp.float32))

    return jax.tree.map(zeros, params)


def _add(total: Any, grad: Any, weight: Float[Array, ""]) -> Any:
    """Return `total + weight * grad`; places without a sum or without a gradient stay."""

    def add(old, new):
        return old if is_hole(old) or is_hole(new) else old + weight.astype(old.dtype) * new

    return jax.tree.map(add, total, grad, is_leaf=is_hole)
