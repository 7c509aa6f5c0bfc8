"""Haiku: kernels and a matrix on manifolds, Adam for the head and biases.

python -m examples.frameworks.haiku
"""

from typing import Any

import haiku as hk
import jax
import optax

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy, minibatches
from manifoldmuon.frameworks.haiku import geometry
from manifoldmuon.manifolds import Hypersphere, Stiefel

OVERRIDES = {
    "conv2_d/w": Hypersphere(scale=4.0, ndim=4),  # the whole kernel has fixed length
    "conv2_d_1/w": Stiefel().with_axes(-2, -1, taps=(-4, -3)),  # a matrix for each tap
    "mlp/~/linear_1/w": None,  # Adam
}


@hk.without_apply_rng
@hk.transform
def network(images: jax.Array) -> jax.Array:
    """Two convolutions and an MLP."""
    x = jax.nn.relu(hk.Conv2D(16, 3)(images))
    x = jax.nn.relu(hk.Conv2D(16, 3, stride=2)(x))
    return hk.nets.MLP([32, 10])(x.mean((1, 2)))


def train(steps: int = 100) -> Trained:
    """Train on the digits."""
    data = list(minibatches(steps))
    params: Any = network.init(jax.random.key(0), data[0][0])
    spaces = geometry(network, data[0][:1], Stiefel(), overrides=OVERRIDES)
    params = mm.optim.project_tree(spaces, params)
    table = mm.optim.tabulate(spaces, params)
    rate = optax.linear_schedule(0.2, 0.0, steps)
    tx = mm.optim.manifold_muon(rate, spaces, rest=optax.adam(0.01))

    @jax.jit
    def step(params, state, images, labels):
        def loss(params):
            return cross_entropy(network.apply(params, images), labels)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for batch in data:
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    measure = jax.jit(lambda params: mm.optim.monitor_distance(spaces, params))
    return Trained(losses, measure(params), table)


if __name__ == "__main__":
    print(train())
