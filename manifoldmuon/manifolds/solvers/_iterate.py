"""One loop for every iterative solver."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float

State = TypeVar("State")


def iterate(
    step: Callable[[int | Array, State], tuple[State, Float[Array, "..."]]],
    state: State,
    steps: int,
    tolerance: float,
) -> State:
    """Applies `step` up to `steps` times.

    Under a transformation (`jit`, `vmap`, `scan`) the count is fixed, so that nothing about the
    cost of a training step depends on the data. On concrete arrays the loop ends as soon as every
    problem of the batch reports an error of at most `tolerance`.

    Args:
      step: `(k, state) -> (state, error)`; `error` has the leading axes' shape.
      state: where to start; any pytree of arrays.
      steps: the budget.
      tolerance: the error at which to stop early; 0 never does.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state))
    if traced or tolerance == 0:
        return jax.lax.fori_loop(0, steps, lambda k, s: step(k, s)[0], state)

    def unfinished(carry):
        k, _, error = carry
        # Not `error > tolerance`, or a NaN would count as finished and hide.
        return (k < steps) & ~jnp.all(error <= tolerance)

    def advance(carry):
        k, inner, _ = carry
        return (k + 1, *step(k, inner))

    error = jax.eval_shape(lambda s: step(0, s)[1], state)
    start = (jnp.int32(0), state, jnp.full(error.shape, jnp.inf, error.dtype))
    return jax.lax.while_loop(unfinished, advance, start)[1]
