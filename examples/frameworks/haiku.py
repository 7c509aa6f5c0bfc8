"""Haiku: kernels and a matrix on manifolds, `optax.partition` with Adam for the rest.

python -m examples.frameworks.haiku
"""

from typing import Any

import haiku as hk
import jax
import optax

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy, minibatches
from manifoldmuon.manifolds import Hypersphere, Stiefel

GEOMETRY = mm.optim.by_path(
    {
        "conv2_d/w": Hypersphere(scale=4.0, ndim=4),  # the whole kernel keeps its length
        "conv2_d_1/w": Stiefel().with_axes(-2, -1, taps=(-4, -3)),  # a matrix for each tap
        "mlp/~/linear_0/w": Stiefel().transposed(),
    }
)


@hk.without_apply_rng
@hk.transform
def network(images: jax.Array) -> jax.Array:
    """Two convolutions and an MLP."""
    x = jax.nn.relu(hk.Conv2D(16, 3)(images))
    x = jax.nn.relu(hk.Conv2D(16, 3, stride=2)(x))
    return hk.nets.MLP([32, 10])(x.mean((1, 2)))


def labels_of(params: Any) -> Any:
    """The optimizer of each parameter: Adam for biases and for the head."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "adam" if name.endswith("/b") or name == "mlp/~/linear_1/w" else "manifolds"

    return jax.tree_util.tree_map_with_path(label, params)


def without_adam(params: Any) -> Any:
    """None in place of what Adam trains: the geometry says nothing of it."""
    return jax.tree.map(
        lambda p, label: p if label == "manifolds" else None, params, labels_of(params)
    )


def train(steps: int = 100) -> Trained:
    """Trains on the digits."""
    data = list(minibatches(steps))
    params: Any = network.init(jax.random.key(0), data[0][0])
    projected = mm.optim.project_tree(GEOMETRY, without_adam(params))
    table = mm.optim.tabulate(GEOMETRY, projected)
    params = jax.tree.map(
        lambda new, old: old if new is None else new, projected, params, is_leaf=lambda x: x is None
    )
    muon = mm.optim.manifold_muon(optax.linear_schedule(0.2, 0.0, steps), GEOMETRY)
    tx = optax.partition({"manifolds": muon, "adam": optax.adam(0.01)}, labels_of)

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
    measure = jax.jit(lambda params: mm.optim.monitor_distance(GEOMETRY, params))
    return Trained(losses, measure(without_adam(params)), table)


if __name__ == "__main__":
    print(train())
