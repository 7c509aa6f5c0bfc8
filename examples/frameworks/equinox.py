"""Equinox: weights in bfloat16, the first layer frozen, the others on the Stiefel manifold.

python -m examples.frameworks.equinox
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy, minibatches
from manifoldmuon.frameworks.equinox import geometry
from manifoldmuon.manifolds import Euclidean, Stiefel


def split(model: eqx.nn.MLP) -> tuple[Any, Any]:
    """Return the trained part of a model, and the rest: functions and the first layer."""
    chosen: Any = jax.tree.map(eqx.is_inexact_array, model)
    chosen = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[0].bias), chosen, replace=(False, False)
    )
    return eqx.partition(model, chosen)


def train(steps: int = 100) -> Trained:
    """Train on the digits."""
    model = eqx.nn.MLP(64, 10, width_size=64, depth=3, key=jax.random.key(0))
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
    params, frozen = split(model)
    spaces = geometry(params, Stiefel(), rest=Euclidean())  # without the first layer
    params = mm.optim.project_tree(spaces, params)
    table = mm.optim.tabulate(spaces, params)
    # The momentum is float32 for parameters of any dtype.
    tx = mm.optim.manifold_muon(optax.linear_schedule(0.2, 0.0, steps), spaces)

    @eqx.filter_jit
    def step(params, state, images, labels):
        def loss(params):
            network = jax.vmap(eqx.combine(params, frozen))
            x = images.reshape(len(images), -1).astype(jnp.bfloat16)
            return cross_entropy(4 * network(x), labels)  # bounded weights, hence the 4

        value, grads = eqx.filter_value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for batch in minibatches(steps):
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    measure = jax.jit(lambda params: mm.optim.monitor_distance(spaces, params))
    return Trained(losses, measure(params), table)


if __name__ == "__main__":
    print(train())
