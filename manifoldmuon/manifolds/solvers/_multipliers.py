"""Steepest directions for any set and any norm: the multipliers of the normal space.

At a point the steepest direction is `max <G, A>` over `||A|| <= 1` with A tangent. Its dual is
`min ||G - N||_dual` over the normal space (or cone): each N bounds the optimum, and the best N
gives `A = dualize(G - N)`. `LineMultiplier`, `BarzilaiBorwein` and `DouglasRachford` use the norm's
duality map and gap, and the projection onto the normal space; `DouglasRachford` also uses the
norm's projection. The warm start of the first two is the normal part `T` left in `X = G - N`,
relative to the tangent part of G: it changes less from step to step than N does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.arrays import Floats, Numbers
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, to_unit_norm
from manifoldmuon.manifolds.solvers._solver import Normal, Steepest
from manifoldmuon.norms import Norm


class TangentGradient(NamedTuple):
    """A gradient without its normal part.

    Attributes:
      tangent: the tangent part, of Frobenius norm 1, or zero.
      whole: the gradient in the same units.
      noise: the rounding error that `tangent` may have.
      still: whether the tangent part is no more than rounding.
      zero: whether the gradient is zero.
    """

    tangent: Floats
    whole: Floats
    noise: Numbers
    still: Bool[Array, "*batch"]
    zero: Bool[Array, "*batch"]


def without_normal(grad: Floats, normal: Normal, ndim: int) -> TangentGradient:
    """Remove the normal part of a gradient, twice: the rest may be as small as rounding."""
    scaled, _ = scale_to_unit_exponent(grad, ndim)
    tangent = scaled - normal.project(scaled)
    tangent = tangent - normal.project(tangent)
    size, length = arrays.frobenius_norm(tangent, ndim), arrays.frobenius_norm(scaled, ndim)
    noise = 8 * jnp.finfo(scaled.dtype).eps * length
    still = size <= noise  # false for a NaN
    normalized = jnp.where(arrays.expand_trailing(still, ndim), 0, to_unit_norm(tangent, ndim))
    size = arrays.nonzero_or_one(size)
    whole = scaled / arrays.expand_trailing(size, ndim)
    return TangentGradient(normalized, whole, noise / size, still, length == 0)


def certified(
    norm: Norm,
    problem: TangentGradient,
    grad: Floats,
    reduced: Floats,
    attained: Floats,
    direction: Floats,
    dual: Any,
    residual: Numbers,
) -> Steepest:
    """Return `direction` with the gap from `attained`, the duality map of `reduced = G - N`.

    `grad` is G or its tangent part. With a multiplier from another gradient, the direction may
    gain little or even descend: if the tangent part of the gradient gains more, return that, with
    a cold start as `dual`.
    """
    ndim = norm.ndim
    upper = arrays.inner_product(reduced, attained, ndim) / (1 - norm.gap(reduced, attained))
    value = arrays.inner_product(grad, direction, ndim)
    if jax.tree.leaves(dual):

        def or_tangent_part(result):
            direction, dual, value = result
            size = arrays.nonzero_or_one(norm.bound(problem.tangent))
            plain = problem.tangent / arrays.expand_trailing(size, ndim)
            gained = arrays.inner_product(grad, plain, ndim)
            worse = value < gained  # false for a NaN, which must stay
            cold = jax.tree.map(jnp.zeros_like, dual)
            return pick(worse, (plain, cold, gained), (direction, dual, value))

        poor = jnp.any(value < 0.5 * upper)
        result = direction, dual, value
        direction, dual, value = jax.lax.cond(poor, or_tangent_part, lambda x: x, result)
    noise = problem.noise * arrays.frobenius_norm(attained, ndim)
    gap = arrays.relative_gap(upper + noise, value - noise)
    gap = jnp.where(problem.still, jnp.where(problem.zero, 0, 1), gap)
    direction = jnp.where(arrays.expand_trailing(problem.still, ndim), 0, direction)
    return Steepest(direction, dual, jnp.where(problem.still, 0, residual), gap)


def shortened(norm: Norm, direction: Floats, change: Floats) -> Floats:
    """Divide `direction`, a direction of norm 1 plus `change`, to norm at most 1."""
    # The second bound is tighter for a small change.
    size = jnp.minimum(norm.bound(direction), 1 + norm.bound(change))
    return direction / arrays.expand_trailing(jnp.maximum(size, 1), norm.ndim)


def repeat(step, state, steps: int, cold: int, warm: Bool[Array, "*batch"], settled=None):
    """Return the state after `steps` steps, and up to `cold` more for problems that need them.

    A problem needs them unless it is `warm` (started from the answer to a similar problem) and the
    function `settled` of the state, if any, finds it close to its answer. Arrays of the state have
    the problems' axes first.
    """

    def once(k, state):
        active = (k < steps) | ~warm
        active = active if settled is None else active | ~settled(state)

        def move(state):
            return pick(active, step(state), state)

        # Not two loops, which would compile the duality map twice.
        return jax.lax.cond(jnp.any(active), move, lambda s: s, state)

    return jax.lax.fori_loop(0, cold + steps, once, state)


def pick(choice: Bool[Array, "*batch"], new: Any, old: Any) -> Any:
    """Choose between two trees for each problem; their arrays have the problems' axes first."""
    expand, ndim = arrays.expand_trailing, choice.ndim
    return jax.tree.map(lambda x, y: jnp.where(expand(choice, x.ndim - ndim), x, y), new, old)
