"""Random trees, and steps with given gradients, compiled as one program."""

from typing import Any

import jax
import numpy as np
import optax


def drawn(seed: int, shapes: Any) -> Any:
    """Draw normal numbers in float32, for a tree of shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.asarray(rng.standard_normal(shape), np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def first_update(tx: Any, grads: Any, params: Any, **arguments: Any) -> Any:
    """Return the updates of a first step."""
    return jax.jit(lambda g, w: tx.update(g, tx.init(w), w, **arguments)[0])(grads, params)


def train(tx: Any, params: Any, batches: list[Any]) -> tuple[Any, Any]:
    """Return parameters and state after a step for each batch of gradients."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, batches):
        return jax.lax.scan(step, (params, tx.init(params)), batches)[0]

    return jax.device_get(run(params, jax.tree.map(lambda *x: np.stack(x), *batches)))
