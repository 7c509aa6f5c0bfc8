"""Training a small classifier on a geometry: the same data and batches for every method."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.lab._classifier import Weights, accuracy, cross_entropy, shapes_of
from manifoldmuon.lab._images import Data, batches, standardise
from manifoldmuon.lab.datasets import load_cifar10, load_digits
from manifoldmuon.optim import init_tree, manifold_muon

BATCH = 128
MULTIPLIER = 4.0  # of the last layer, as tuned for the main job


class Trained(NamedTuple):
    """What training came to.

    Attributes:
      loss: of the whole training part, in nats, of the final weights.
      accuracy: the share of the test part that is labelled right.
      weights: after the last step.
    """

    loss: float
    accuracy: float
    weights: Weights


@functools.lru_cache(maxsize=8)
def digits(seed: int) -> Data:
    """The digits, in the split of this seed."""
    return standardise(load_digits(seed))


@functools.lru_cache(maxsize=1)
def photographs(folder: Path | None) -> Data:
    """CIFAR-10, or the part of it that lies in a folder or an archive."""
    return standardise(load_cifar10(folder))


def train(
    data: Data,
    geometry: tuple[Any, ...],
    widths: tuple[int, ...],
    rate: float,
    steps: int,
    seed: int,
    dtype: str = "float32",
) -> Trained:
    """Trains once with manifold Muon: momentum 0.95, a rate that falls linearly to zero.

    Args:
      data: the images.
      geometry: a manifold for every layer.
      widths: of the hidden layers.
      rate: the first learning rate.
      steps: how many, of 128 images each.
      seed: of the initial weights and of the order of the images.
      dtype: in which the weights are kept.
    """
    shapes = shapes_of(data.widths(widths))
    templates = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    weights = init_tree(list(geometry), jax.random.key(seed), templates)
    order = batches(seed, len(data.train_y), steps, BATCH)
    weights = _compiled(geometry)(weights, data.train_x, data.train_y, order, jnp.float32(rate))
    loss, correct = evaluate(weights, data)
    return Trained(loss, correct, weights)


@jax.jit
def _evaluate(weights: Any, images: tuple[Any, ...], labels: tuple[Any, ...]) -> Any:
    loss = cross_entropy(weights, images[0], labels[0], MULTIPLIER)
    return loss, accuracy(weights, images[1], labels[1])


def evaluate(weights: Weights, data: Data) -> tuple[float, float]:
    """The loss of the training part and the accuracy on the test part, in float32."""
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    images, labels = (data.train_x, data.test_x), (data.train_y, data.test_y)
    loss, correct = _evaluate(weights, images, labels)
    return float(loss), float(correct)


@functools.lru_cache(maxsize=4)
def _compiled(geometry: tuple[Any, ...]) -> Any:
    """All steps in one program, for every seed and rate."""

    @jax.jit
    def run(weights, images, labels, order, rate):
        tx = manifold_muon(lambda k: rate * (1 - k / len(order)), list(geometry))

        def step(carry, batch):
            weights, state = carry
            grads = jax.grad(_loss)(weights, images[batch], labels[batch])
            updates, state = tx.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        (weights, _), _ = jax.lax.scan(step, (weights, tx.init(weights)), order)
        return weights

    return run


def _loss(weights: Any, images: Any, labels: Any) -> Any:
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    return cross_entropy(wide, images, labels, MULTIPLIER)
