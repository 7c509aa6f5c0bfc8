"""A learning rate found by trying: backtracking along the curve of the retraction."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon._internal.arguments import check_arguments, check_number, number
from manifoldmuon._internal.arrays import nonzero_or_one
from manifoldmuon._internal.links import require
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon.contrib._rule import inner, scaled
from manifoldmuon.optim import Geometry, retract


class ScaleByLineSearchState(NamedTuple):
    """State of `scale_by_line_search`: the result of the last search.

    Attributes:
      learning_rate: where the next search begins, up to `growth`; the widest dtype of the
        parameters, at least float32.
      trials: how many losses were computed; int32.
      slope: `<gradient, direction>`; the same dtype.
    """

    learning_rate: Float[Array, ""]
    trials: Int[Array, ""]
    slope: Float[Array, ""]


@check_arguments(
    first=number("(0, inf)"),
    growth=number("[1, inf)"),
    shrink=number("(0, 1)"),
    share=number("(0, 1)"),
    max_trials=functools.partial(check_number, within="[1, inf)", whole=True),
)
def scale_by_line_search(
    geometry: Geometry,
    *,
    first: float = 1.0,
    growth: float = 2.0,
    shrink: float = 0.5,
    share: float = 0.5,
    max_trials: int = 30,
) -> optax.GradientTransformationExtraArgs:
    """Scale updates by minus a learning rate found by Armijo's rule along the retraction.

    It takes the place of `optax.scale_by_learning_rate`, and flips the sign as that does.

    The step `eta` is accepted when `loss(R(W, -eta A)) <= loss(W) - share * eta * <G, A>`. The
    first trial is `growth` times the last step, each next one `shrink` times the one before. A
    loss that is not finite does not count as a decrease. If no trial succeeds the weights stay
    where they are, so that the loss that is searched never increases. The next search then
    continues from the last trial; if the decrease promised there is below the rounding of the
    loss, it begins where this one did. Where `value` or the gradient is NaN nothing is searched,
    and the next search begins where this one would have. Losses are compared in the dtype of
    `value`, at least in that of the state. Derivatives take the number of trials for fixed, as it
    is nearby: the step follows the rate that the search began at.

    `update` takes what Optax's line searches take: `tx.update(grads, state, params, value=loss,
    grad=grads, value_fn=f)`, where `f(params)` is the loss, on the batch of the step. `f` needs the
    whole tree, so this link does not belong inside `optax.masked` or `optax.partition`. Inside of
    `jax.shard_map` it has to end with the `jax.lax.pmean` of `value`.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      first: the learning rate before the first search. 1 moves the network's output by about 1
        where updates have modular norm 1.
      growth: at least 1.
      shrink: between 0 and 1.
      share: of the decrease that the slope promises, between 0 and 1. One half accepts at most
        the minimiser of a parabola.
      max_trials: losses to compute at most in one step. These numbers are fixed when the link is
        made: name them in `static_args` of `optax.inject_hyperparams`.

    Returns:
      A transformation whose state is a `ScaleByLineSearchState`.

    Raises:
      ValueError: for a number out of its range; on use, without `value`, `grad` or `value_fn`.

    Examples:
      >>> g = mm.manifolds.Hypersphere()
      >>> links = mm.optim.scale_by_steepest(g), scale_by_line_search(g), mm.optim.retract(g)
      >>> tx = mm.optim.chain(*links)
    """
    onto = retract(geometry)

    def init_fn(params: Any) -> ScaleByLineSearchState:
        kinds = [getattr(x, "dtype", jnp.float32) for x in jax.tree.leaves(params)]
        kind = jnp.result_type(jnp.float32, *[k for k in kinds if jnp.issubdtype(k, jnp.floating)])
        start = jnp.asarray(first / growth, kind)
        trials, slope = jnp.zeros((), jnp.int32), jnp.zeros((), kind)
        return match_varying_axes(ScaleByLineSearchState(start, trials, slope), params)

    def update_fn(
        updates, state, params: Any = None, *, value=None, grad=None, value_fn: Any = None, **extra
    ):
        del extra
        require("scale_by_line_search", value=value, grad=grad, value_fn=value_fn)
        slope = inner(grad, updates, state.slope.dtype)
        promised = share * jnp.maximum(slope, 0.0)
        now = jnp.asarray(value, jnp.promote_types(slope.dtype, jnp.result_type(value)))

        def decreases(rate: Float[Array, ""]) -> Any:
            step, _ = onto.update(scaled(updates, -rate), optax.EmptyState(), params)
            loss = jnp.asarray(value_fn(optax.apply_updates(params, step)), now.dtype)
            return jnp.isfinite(loss) & (loss <= now - rate * promised)

        # Where nothing can be compared there is nothing to search, and the rate stays.
        comparable = jnp.isfinite(slope) & ~jnp.isnan(now)

        def unfinished(carry):
            _, trials, found = carry
            return comparable & ~found & (trials < max_trials)

        def tries(carry):
            rate, trials, _ = carry
            rate = jnp.where(trials == 0, rate, rate * shrink)
            return rate, trials + 1, decreases(rate)

        begin = growth * state.learning_rate
        # How often to shrink is a whole number: there is no derivative but that of the first rate.
        still = jax.lax.stop_gradient(begin)
        start = still, jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        start = match_varying_axes(start, now, slope, updates, params)
        rate, trials, found = jax.lax.while_loop(unfinished, tries, start)
        rate = rate + rate / nonzero_or_one(still) * (begin - still)
        # A NaN in the gradient has to stay visible; a failed search is not an error.
        taken = jnp.where(found, rate, 0.0) + 0.0 * slope
        # Without a limit the rate would be zero after a few failed searches, and stay so.
        least = jnp.finfo(now.dtype).eps * jnp.maximum(jnp.abs(now), first * promised)
        kept = jnp.where(
            comparable & (found | (rate * promised > least)), rate, state.learning_rate
        )
        return scaled(updates, -taken), ScaleByLineSearchState(kept, trials, slope)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
