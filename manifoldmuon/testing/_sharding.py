"""Checks of a gradient transformation on a mesh of devices."""

from typing import Any

import chex
import jax
import optax


def check_sharding(
    tx: optax.GradientTransformation,
    params: Any,
    grads: Any,
    shardings: Any,
) -> None:
    """Checks that sharded parameters give what unsharded ones give.

    Args:
      tx: the transformation.
      params: parameters on one device.
      grads: gradients of the same tree.
      shardings: one `jax.sharding.NamedSharding` per parameter, on a mesh whose axes may be
        automatic or explicit.

    Raises:
      AssertionError: if two steps differ from those on one device, or if updates or states
        change their sharding types, so that the second step compiles again.
    """
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    wanted, state = [], tx.init(params)
    sharded, sharded_grads = jax.device_put((params, grads), (shardings, shardings))
    for _ in range(2):
        updates, params, state = step(params, state, grads)
        wanted.append(updates)
    state = tx.init(sharded)
    with jax.set_mesh(jax.tree.leaves(shardings)[0].mesh):
        chex.assert_trees_all_equal(_types(jax.jit(tx.init)(sharded)), _types(state))
    types = _types((sharded, sharded, state))
    traces.clear()
    for expected in wanted:
        updates, sharded, state = step(sharded, state, sharded_grads)
        chex.assert_trees_all_equal(_types((updates, sharded, state)), types)
        chex.assert_trees_all_close(jax.device_get(updates), expected, rtol=1e-4, atol=1e-5)
    assert len(traces) == 1, f"{len(traces)} compilations in two steps"


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: str(jax.typeof(x)), tree)
