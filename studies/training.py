"""The training loop that studies share."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def begin(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """Return parameters and optimizer state: the carry of `train`."""
    return params, tx.init(params)


def train(
    tx: optax.GradientTransformation,
    loss: Callable[[Any, Any], Any],
    carry: tuple[Any, Any],
    batches: Any,
    measure: Callable[[Any, Any], Any] = lambda params, state: None,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Take a step for each batch, as one scan; call it under `jax.jit`.

    Args:
      tx: the optimizer.
      loss: maps parameters and a batch to a number.
      carry: parameters and optimizer state, see `begin`.
      batches: a tree of arrays with a leading axis of steps.
      measure: maps parameters and state after a step to a tree of numbers.

    Returns:
      The carry after the last step; the loss of each batch before its step, and the measurements.
    """

    def step(carry: tuple[Any, Any], batch: Any) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (value, measure(params, state))

    return jax.lax.scan(step, carry, batches)
