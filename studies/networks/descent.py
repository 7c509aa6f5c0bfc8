"""Training, compiled once for all learning rates and seeds."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.modules import Compose, Module
from studies.networks.architectures import gaussian_weights
from studies.networks.methods import Method
from studies.networks.tasks import Task

PROBE = 64


class Descent(NamedTuple):
    """The hashable settings of a training: the cache key of its compiled program.

    Attributes:
      method: the parametrisation and optimizer.
      network: the network.
      task: the data.
      steps: the number of steps; the learning rate falls linearly to zero.
      early: the number of steps after which the early weights are kept.
      multiplier: the factor of the scores.
    """

    method: Method
    network: Module
    task: Task
    steps: int
    early: int
    multiplier: float

    def train(self, rates: Any, seed: int) -> "Trained":
        """Train with each learning rate, with the same initial weights and batches."""
        start = self.start(seed)
        train = self.task.parts().train
        order = self.task.order(self.steps, seed)
        return _training(self)(jnp.asarray(rates, jnp.float32), start, order, train)

    def start(self, seed: int) -> Any:
        """Return the initial weights of a seed: the same with and without constraints."""
        # Drop constraints and masses, which do not matter here, so that methods share a program.
        plain = self.network.unconstrained().map_atoms(
            lambda atom: dataclasses.replace(atom, mass=1.0)
        )
        return _start(self.method.standard, plain)(jax.random.key(seed))

    def loss(self, weights: Any, x: Any, y: Any) -> Float[Array, ""]:
        """Compute the cross-entropy of a batch."""
        return cross_entropy(self.multiplier * self.network.apply(weights, x), y)

    def changes(self, trained: "Trained", seed: int) -> dict[str, np.ndarray]:
        """Return the change of features over the early steps, by layer, for each rate."""
        x = self.task.parts().held_out[0][:PROBE]
        moved = _changes(self.network.unconstrained())(self.start(seed), trained.early, x)
        return {layer: np.asarray(values, np.float64) for layer, values in moved.items()}


class Trained(NamedTuple):
    """Results of training, with a leading axis for the rates.

    Attributes:
      loss: the loss on each batch before its update.
      early: the weights after the early steps.
      final: the weights after the last step.
    """

    loss: Float[Array, "rates steps"]
    early: Any
    final: Any


def late_loss(losses: Float[np.ndarray, "*rates steps"]) -> Float[np.ndarray, "*rates"]:
    """Return the mean loss over the last fifth of the steps."""
    keep = max(1, losses.shape[-1] // 5)
    return np.asarray(losses, np.float64)[..., -keep:].mean(axis=-1)


def cross_entropy(scores: Float[Array, "*batch classes"], y: Int[Array, "*batch"]) -> Any:
    """Compute the mean cross-entropy over all labels, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


@functools.lru_cache(maxsize=4)
def _start(gaussian: bool, network: Module) -> Any:
    return jax.jit(functools.partial(gaussian_weights, network) if gaussian else network.init)


@functools.lru_cache(maxsize=2)
def _training(descent: Descent) -> Any:
    method, network, task, steps, early, _ = descent

    def train(rate: Any, start: Any, order: Any, data: Any) -> Trained:
        tx = method.optimizer(lambda k: rate * (1 - k / steps), network)

        def step(carry: Any, now: Any) -> Any:
            weights, state, young = carry
            k, batch = now
            value, grads = jax.value_and_grad(descent.loss)(weights, *task.batch_of(data, batch))
            updates, state = tx.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            young = jax.tree.map(lambda a, b: jnp.where(k < early, a, b), weights, young)
            return (weights, state, young), value

        carry = start, tx.init(start), start
        (final, _, young), losses = jax.lax.scan(step, carry, (jnp.arange(steps), order))
        return Trained(losses, young, final)

    @jax.jit
    def run(rates: Any, start: Any, order: Any, data: Any) -> Trained:
        # lax.map, not vmap: on CPUs a batch of small products is slower than a loop.
        return jax.lax.map(lambda rate: train(rate, start, order, data), rates)

    return run


def feature_changes(
    network: Module, before: Any, after: Any, x: Any
) -> dict[str, Float[Array, ""]]:
    """Return the RMS change of each layer's output between two trees of weights.

    Layers are the top-level parts of the network with positive mass, counted from 1 at the input;
    a stack of blocks is a single layer.

    Args:
      network: the network.
      before: a tree of weights.
      after: a second tree of weights, such as the weights after a few steps.
      x: inputs.
    """
    pairs = zip(_features(network, before, x), _features(network, after, x), strict=True)
    moved = [jnp.sqrt(jnp.mean((new - old) ** 2)) for old, new in pairs]
    return {str(number): change for number, change in enumerate(moved, 1)}


def _features(network: Module, weights: Any, x: Any) -> list[Array]:
    if not isinstance(network, Compose):
        return [network.apply(weights, x)]
    found = []
    for part, own in zip(network.parts, weights, strict=True):
        x = part.apply(own, x)
        if part.mass > 0:
            found.append(x)
    return found


@functools.lru_cache(maxsize=4)
def _changes(network: Module) -> Any:
    @jax.jit
    def changes(before: Any, after: Any, x: Any) -> Any:
        return jax.lax.map(lambda weights: feature_changes(network, before, weights, x), after)

    return changes
