"""Steepest directions for any set and any norm: the multipliers of the normal space.

At a point the steepest direction is `max <G, A>` over `||A|| <= 1` with A tangent. Its dual is
`min ||G - N||_dual` over the normal space (or cone): each N bounds the optimum, and the best one
gives `A = dualize(G - N)`. `LineMultiplier`, `BarzilaiBorwein` and `DouglasRachford` ask a norm for
its duality map and its gap, and a set for the projection onto its normal space. What they hand on
is the normal part `T` that is left in `X = G - N`, relative to the tangent part of G: it changes
less from step to step than N does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.arrays import (
    Floats,
    Numbers,
    expand_trailing,
    frobenius_norm,
    inner_product,
    nonzero_or_one,
    relative_gap,
)
from manifoldmuon._internal.powers_of_two import normalize, scale_to_unit_exponent
from manifoldmuon.manifolds.solvers._solver import Normal, Steepest
from manifoldmuon.norms import Norm


class Problem(NamedTuple):
    """A gradient without its normal part.

    Attributes:
      part: the tangent part, of Frobenius norm 1, or zero.
      whole: the gradient in the same units.
      noise: what rounding may hide in `part`.
      still: whether the tangent part is no more than rounding.
      zero: whether the gradient is zero.
    """

    part: Floats
    whole: Floats
    noise: Numbers
    still: Bool[Array, "*batch"]
    zero: Bool[Array, "*batch"]


def without_normal(grad: Floats, normal: Normal, ndim: int) -> Problem:
    """Takes the normal part out of a gradient, twice: the rest may be small beside rounding."""
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    part = scaled - normal.project(scaled)
    part = part - normal.project(part)
    size, length = frobenius_norm(part, ndim), frobenius_norm(scaled, ndim)
    noise = 8 * jnp.finfo(scaled.dtype).eps * length
    # What a short dtype rounds a gradient by is no direction either. False for a NaN.
    still = size <= jnp.maximum(noise, jnp.finfo(grad.dtype).eps / 2 * length)
    unit = jnp.where(expand_trailing(still, ndim), 0, normalize(part, ndim))
    size = nonzero_or_one(size)
    return Problem(unit, scaled / expand_trailing(size, ndim), noise / size, still, length == 0)


def certified(
    norm: Norm,
    problem: Problem,
    grad: Floats,
    reduced: Floats,
    attained: Floats,
    direction: Floats,
    dual: Any,
    residual: Numbers,
) -> Steepest:
    """`direction` with the bound that `attained`, the duality map of `reduced = G - N`, gives.

    `grad` is G, with as much of its normal part as matters to a tangent direction. A multiplier
    that was right for another gradient may give a direction that gains little, or descends: where
    the tangent part of a gradient gains more, it takes its place, and `dual` becomes a cold start.
    """
    ndim = norm.ndim
    upper = inner_product(reduced, attained, ndim) / (1 - norm.gap(reduced, attained))
    value = inner_product(grad, direction, ndim)
    if jax.tree.leaves(dual):

        def or_tangent_part(answer):
            direction, dual, value = answer
            size = nonzero_or_one(norm.bound(problem.part))
            plain = problem.part / expand_trailing(size, ndim)
            gained = inner_product(grad, plain, ndim)
            worse = value < gained  # false for a NaN, which has to stay
            cold = jax.tree.map(jnp.zeros_like, dual)
            return pick(worse, (plain, cold, gained), (direction, dual, value))

        poor = jnp.any(value < 0.5 * upper)
        answer = direction, dual, value
        direction, dual, value = jax.lax.cond(poor, or_tangent_part, lambda x: x, answer)
    noise = problem.noise * frobenius_norm(attained, ndim)
    gap = relative_gap(upper + noise, value - noise)
    gap = jnp.where(problem.still, jnp.where(problem.zero, 0, 1), gap)
    direction = jnp.where(expand_trailing(problem.still, ndim), 0, direction)
    return Steepest(direction, dual, jnp.where(problem.still, 0, residual), gap)


def shortened(norm: Norm, direction: Floats, change: Floats) -> Floats:
    """To norm 1 at most, for a direction that differs by `change` from one of norm 1."""
    # The second bound is the tighter one where the change is small.
    size = jnp.minimum(norm.bound(direction), 1 + norm.bound(change))
    return direction / expand_trailing(jnp.maximum(size, 1), norm.ndim)


def repeat(step, state, steps: int, cold: int, warm: Bool[Array, "*batch"], settled=None):
    """Return the state after `steps` steps, and up to `cold` more for problems that need them.

    Args:
      step: of the state, for all problems.
      state: arrays with the problems' axes first.
      steps: for every problem.
      cold: for problems that are not `warm`, and while they are not `settled`.
      warm: which problems start from an answer to a similar one.
      settled: of a state, which problems are close to their answer; None: all that are warm.
    """

    def once(k, state):
        active = (k < steps) | ~warm
        active = active if settled is None else active | ~settled(state)

        def move(state):
            return pick(active, step(state), state)

        # Not two loops: the program would hold the duality map twice.
        return jax.lax.cond(jnp.any(active), move, lambda s: s, state)

    return jax.lax.fori_loop(0, cold + steps, once, state)


def pick(choice: Bool[Array, "*batch"], new: Any, old: Any) -> Any:
    """For each problem one of two trees, whose arrays have the problems' axes first."""

    def one(new, old):
        return jnp.where(expand_trailing(choice, new.ndim - choice.ndim), new, old)

    return jax.tree.map(one, new, old)
