"""Flax NNX: the geometry derived from modules, including convolutions and stacked layers.

python -m examples.frameworks.nnx
"""

import jax
import optax
from flax import nnx

import manifoldmuon as mm
from examples.frameworks.digits import Trained, cross_entropy, minibatches
from manifoldmuon.frameworks.nnx import geometry
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import ConvRMSToRMS, RMSToRMS

WIDTH, DEPTH = 32, 3


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(self.norm(x)))


class Net(nnx.Module):
    """Two convolutions, a scanned stack of blocks, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, WIDTH, (3, 3), strides=2, rngs=rngs)

        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap
        def stacked(rngs):
            return Block(rngs)

        self.blocks = stacked(rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.second(nnx.relu(self.first(images)))).mean((1, 2))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(block, x):
            return block(x)

        return self.head(through(self.blocks, x))


UNCONSTRAINED = {
    "first/kernel": Euclidean(ConvRMSToRMS()),
    "head/kernel": Euclidean(RMSToRMS()),
}


def train(steps: int = 100) -> Trained:
    """Train on the digits."""
    model = Net(nnx.Rngs(0))
    spaces = geometry(
        model, Stiefel(solver=ProjectedPolar()), rest=Euclidean(), overrides=UNCONSTRAINED
    )
    params = mm.optim.project_tree(spaces, nnx.state(model, nnx.Param))
    table = mm.optim.tabulate(spaces, params)
    nnx.update(model, params)
    tx = mm.optim.manifold_muon(optax.linear_schedule(0.2, 0.0, steps), spaces)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, labels):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(images), labels))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, *batch)) for batch in minibatches(steps)]
    measure = jax.jit(lambda params: mm.optim.monitor_distance(spaces, params))
    return Trained(losses, measure(nnx.state(model, nnx.Param)), table)


if __name__ == "__main__":
    print(train())
