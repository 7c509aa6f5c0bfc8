"""The critics in Flax NNX, their optimizers and their training."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from manifoldmuon.frameworks.nnx import geometry
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import Lipschitz
from manifoldmuon.optim import manifold_muon
from studies.certified.methods import METHODS as PARAMETRISATIONS
from studies.critics.study import METHODS, OURS, PROBLEMS, Points, Problem

BIASES = 0.1
"""The rate of Adam for the biases over the rate of the kernels, on manifolds."""


def _linear(fan_in: int, fan_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(fan_in, fan_out, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)


class Bjorck(nnx.Linear):
    """A layer that orthonormalises its kernel, in place like `nnx.SpectralNorm`."""

    method = PARAMETRISATIONS["Björck + Adam"]

    def __init__(self, fan_in: int, fan_out: int, rngs: nnx.Rngs):
        super().__init__(fan_in, fan_out, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)
        self.vector = nnx.BatchStat(self.method.begin(self.kernel[...])[1])

    def __call__(self, inputs: Any) -> Any:
        self.vector[...] = self.method.carried(self.kernel[...], self.vector[...])
        self.kernel[...] = self.method.weight(self.kernel[...], self.vector[...])
        return super().__call__(inputs)


class Critic(nnx.Module):
    """Layers of the given type, with an activation in between and one output."""

    def __init__(self, widths: Sequence[int], layer: Any, activation: Any, rngs: nnx.Rngs):
        self.layers = nnx.List([layer(*pair, rngs) for pair in itertools.pairwise((*widths, 1))])
        self.activation = activation.forward

    def __call__(self, x: Points) -> Float[Array, " n"]:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)[:, 0]


def _muon(rate: Any, critic: Critic) -> optax.GradientTransformation:
    spaces = geometry(critic, Stiefel(Lipschitz(), solver=ProjectedPolar()))
    biases = optax.adam(lambda step: BIASES * rate(step))
    return manifold_muon(rate, spaces, rest=biases, track_gap=False)


def _adam(b1: float, b2: float) -> Callable[[Any, Any], optax.GradientTransformation]:
    return lambda rate, critic: optax.adam(rate, b1, b2)


def _spectral_norm(fan_in: int, fan_out: int, rngs: nnx.Rngs) -> nnx.SpectralNorm:
    return nnx.SpectralNorm(_linear(fan_in, fan_out, rngs), rngs=rngs)


NETWORKS: dict[str, tuple[Any, Callable[[Any, Critic], optax.GradientTransformation]]] = {
    OURS: (_linear, _muon),
    "Björck": (Bjorck, _adam(0.9, 0.99)),
    "spectral norm": (_spectral_norm, _adam(0.0, 0.9)),
    "spectral norm, MaxMin": (_spectral_norm, _adam(0.0, 0.9)),
    "gradient penalty": (_linear, _adam(0.0, 0.9)),
}
"""For each method what builds a layer from fan-in, fan-out and `nnx.Rngs`, and the optimizer from a
schedule of the rate and the critic."""


@functools.lru_cache(maxsize=1)
def training(name: str, widths: tuple[int, ...], steps: int, batch: int) -> Any:
    """Compile a training; it returns weight (out, in) and bias of each layer, as used."""
    method, (layer, optimizer) = METHODS[name], NETWORKS[name]

    def run(seed: Any, rate: Any, problem: Problem) -> Any:
        key = jax.random.key(seed)
        critic = Critic(widths, layer, method.activation, nnx.Rngs(key))
        tx = optimizer(optax.linear_schedule(rate, 0.0, steps), critic)
        graph, params, stats = nnx.split(critic, nnx.Param, ...)

        def loss(params: Any, stats: Any, key: Any) -> Any:
            critic, keys = nnx.merge(graph, params, stats, copy=True), jax.random.split(key, 3)
            x = problem.pairs(keys[0], batch, widths[0])[0]
            y = problem.pairs(keys[1], batch, widths[0])[1]
            low, high = jnp.split(critic(jnp.concatenate([x, y])), 2)
            value, stats = low.mean() - high.mean(), nnx.split(critic, nnx.Param, ...)[2]
            if method.penalty:
                between = x + jax.random.uniform(keys[2], (batch, 1)) * (y - x)
                slopes = jnp.linalg.norm(jax.grad(lambda z: critic(z).sum())(between), axis=-1)
                value += method.penalty * jnp.square(slopes - 1).mean()
            return value, stats

        def step(carry: Any, key: Any) -> Any:
            params, stats, state = carry
            grads, stats = jax.grad(loss, has_aux=True)(params, stats, key)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), stats, state), None

        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        (params, stats, _), _ = jax.lax.scan(step, (params, stats, tx.init(params)), keys)
        critic = nnx.merge(graph, params, stats)
        critic(jnp.zeros((1, widths[0])))  # layers write the kernels that they use
        layers = [getattr(layer, "layer_instance", layer) for layer in critic.layers]
        return [(layer.kernel[...].mT, layer.bias[...]) for layer in layers]

    return jax.jit(run).lower(0, 0.1, PROBLEMS["shift"]).compile()
