"""Nested dictionaries: stacked layers under `lax.scan`, Adam for gains and biases, and gradient
accumulation.

python -m examples.frameworks.plain
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy, minibatches
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS

WIDTH, DEPTH, EVERY = 64, 4, 2

MATRIX = Stiefel(solver=ProjectedPolar())
GEOMETRY = {
    "first": {"w": Euclidean(RMSToRMS())},  # (fan_out, fan_in): the layout of the manifolds
    "stack": {"w": MATRIX.stacked(), "gain": None, "bias": None},  # None: Adam
    "head": {"w": MATRIX.transposed()},
}


@jax.jit
def init(key: jax.Array) -> Any:
    """Return initial weights: matrices are random points on their manifolds."""
    shapes: Any = {
        "first": {"w": (WIDTH, 64)},
        "stack": {"w": (DEPTH, WIDTH, WIDTH), "gain": (DEPTH, WIDTH), "bias": (DEPTH, WIDTH)},
        "head": {"w": (WIDTH, 10)},
    }
    zeros = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda node: isinstance(node, tuple))
    zeros["stack"]["gain"] = jnp.ones((DEPTH, WIDTH))
    return mm.optim.init_tree(GEOMETRY, key, zeros)


def apply(params: Any, images: jax.Array) -> jax.Array:
    """Compute scores `(batch, 10)`."""

    def layer(x, p):
        return x + p["gain"] * jax.nn.relu(x @ p["w"].T + p["bias"]), None

    x = images.reshape(len(images), -1) @ params["first"]["w"].T
    x, _ = jax.lax.scan(layer, x, params["stack"])
    return x @ params["head"]["w"]


def train(steps: int = 100) -> Trained:
    """Train on the digits, with an update every second batch."""
    params = init(jax.random.key(0))
    table = mm.optim.tabulate(GEOMETRY, params)
    rate = optax.linear_schedule(0.2, 0.0, steps // EVERY)
    muon = mm.optim.manifold_muon(rate, GEOMETRY, rest=optax.adam(0.01))
    tx = optax.MultiSteps(muon, every_k_schedule=EVERY).gradient_transformation()

    @jax.jit
    def step(params, state, images, labels):
        value, grads = jax.value_and_grad(lambda p: cross_entropy(apply(p, images), labels))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = jax.jit(tx.init)(params), []
    for batch in minibatches(steps):
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    measure = jax.jit(lambda params: mm.optim.monitor_distance(GEOMETRY, params))
    return Trained(losses, measure(params), table)


if __name__ == "__main__":
    print(train())
