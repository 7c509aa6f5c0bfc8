"""A short training run for tests."""

import jax
import optax

from manifoldmuon import optim


def train(geometry, shapes, loss, steps=200, rate=0.3):
    """Return the last parameters, the losses, and the distances from the sets."""
    tx = optim.manifold_muon(optax.linear_schedule(rate, 0.0, steps), geometry, momentum=0.5)

    @jax.jit
    def run(key):
        params = optim.init_tree(geometry, key, shapes)

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        start = params, tx.init(params)
        (params, _), values = jax.lax.scan(step, start, length=steps)
        return params, values, optim.monitor_distance(geometry, params)

    return jax.device_get(run(jax.random.key(0)))
