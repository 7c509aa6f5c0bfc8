"""Classify images with a small ReLU network: data, network, training and solver inputs.

The network has no biases: its weights are a list of (fan_out, fan_in) matrices. Every method is
trained with the same data, initial weights and batches.
"""

import functools
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import init_tree, manifold_muon
from studies import training
from studies.datasets import FlatImages, batches, load_cifar10, load_digits, standardise

BATCH = 128
MULTIPLIER = 4.0  # scales the logits; tuned for the main job

# Unnamed axes: a named axis would need the same size in every layer.
Weights = list[Float[Array, "_ _"]]

Builder = Callable[[Any], optax.GradientTransformation]

# --- Images ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def digits(seed: int) -> FlatImages:
    """Load the standardised digits, split by this seed."""
    return standardise(load_digits(seed))


@functools.lru_cache(maxsize=1)
def cifar10(folder: Path | None) -> FlatImages:
    """Load CIFAR-10, standardised; from a folder or archive, possibly a subset."""
    return standardise(load_cifar10(folder))


# --- The network -------------------------------------------------------------------------------


def shapes_of(widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the weight shapes for layers of these widths."""
    return [(after, before) for before, after in itertools.pairwise(widths)]


def init_weights(seed: int | Int[Array, ""], shapes: list[tuple[int, int]]) -> Weights:
    """Return random matrices with all singular values 1: the start of every optimizer."""
    templates = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return init_tree(Stiefel(), jax.random.key(seed), templates)


def logits(
    weights: Weights, images: Float[Array, "batch pixels"], multiplier: float
) -> Float[Array, "batch classes"]:
    """Compute the network's output.

    A Lipschitz constant limits the differences of logits, hence the confidence that
    cross-entropy rewards. The multiplier sets this limit: it is the Lipschitz bound of the
    network if all matrices have spectral norm 1.
    """
    *hidden, last = weights
    for weight in hidden:
        images = jax.nn.relu(images @ weight.T)
    return multiplier * (images @ last.T)


def cross_entropy(
    weights: Weights,
    images: Float[Array, "batch pixels"],
    labels: Int[Array, " batch"],
    multiplier: float,
) -> Float[Array, ""]:
    """Compute the mean cross-entropy of the batch, in nats."""
    outputs = logits(weights, images, multiplier)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def accuracy(
    weights: Weights, images: Float[Array, "batch pixels"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    """Return the share of images with the largest logit at the label."""
    return jnp.mean(jnp.argmax(logits(weights, images, 1.0), axis=-1) == labels)


# --- Training ----------------------------------------------------------------------------------


def train(
    data: FlatImages,
    build: Builder,
    weights: Weights,
    rate: float,
    steps: int,
    seed: int,
    batch: int = BATCH,
    multiplier: float = MULTIPLIER,
) -> Weights:
    """Train once, with a learning rate that falls linearly to zero; return the weights.

    Args:
      data: the images.
      build: maps a learning rate (a schedule) to the optimizer; the key of the compiled program,
        which serves all seeds and rates.
      weights: the initial weights, of any dtype; the loss is computed in float32.
      rate: the initial learning rate.
      steps: the number of steps.
      seed: seeds the order of the images.
      batch: images per step.
      multiplier: the scale of the logits.
    """
    order = batches(seed, len(data.train_y), steps, batch)
    run = _compiled(build, multiplier)
    return run(weights, data.train_x, data.train_y, order, jnp.float32(rate))


@functools.lru_cache(maxsize=4)
def _compiled(build: Builder, multiplier: float) -> Any:
    @jax.jit
    def run(weights: Any, images: Any, labels: Any, order: Any, rate: Any) -> Any:
        tx = build(lambda k: rate * (1 - k / len(order)))

        def loss(weights: Any, batch: Any) -> Any:
            wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
            return cross_entropy(wide, images[batch], labels[batch], multiplier)

        return training.train(tx, loss, training.begin(tx, weights), order)[0][0]

    return run


@jax.jit
def _evaluate(weights: Any, images: tuple[Any, ...], labels: tuple[Any, ...]) -> Any:
    loss = cross_entropy(weights, images[0], labels[0], MULTIPLIER)
    return loss, accuracy(weights, images[1], labels[1])


def evaluate(weights: Weights, data: FlatImages) -> tuple[float, float]:
    """Return the training loss and the test accuracy, computed in float32."""
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    images, labels = (data.train_x, data.test_x), (data.train_y, data.test_y)
    loss, correct = _evaluate(weights, images, labels)
    return float(loss), float(correct)


# --- Solver inputs -----------------------------------------------------------------------------


class Given(NamedTuple):
    """Solver input for a layer at a step: tall (wide layers are transposed), float32.

    Attributes:
      point: a weight W on the Stiefel manifold of scale 1.
      gradient: the momentum at W; at step 0 a multiple of a batch gradient.
    """

    point: np.ndarray
    gradient: np.ndarray


def trajectory(
    data: FlatImages,
    widths: tuple[int, ...],
    geometry: Any,
    rate: float,
    steps: int,
    batch_size: int,
    multiplier: float,
    seed: int,
    at: Collection[int],
) -> dict[int, list[Given]]:
    """Train with manifold Muon and keep the inputs of its solver.

    Args:
      data: the images.
      widths: the widths of the hidden layers.
      geometry: the manifolds of the weights: Stiefel manifolds of scale 1.
      rate: the initial learning rate; it falls linearly to zero over the steps.
      steps: the length of the schedule; training ends after the last step in `at`.
      batch_size: images per step.
      multiplier: the scale of the logits.
      seed: seeds the initial weights and the order of the images.
      at: the steps to keep, counted from 0.

    Returns:
      A list over layers for each step to keep.
    """
    images, labels = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    order = batches(seed, len(data.train_y), steps, batch_size)
    # Split manifold_muon to expose the momentum.
    momentum = optax.trace(0.95, nesterov=True)
    descent = manifold_muon(optax.linear_schedule(rate, 0.0, steps), geometry, momentum=None)

    @jax.jit
    def step(weights, states, batch):
        grads = jax.grad(cross_entropy)(weights, images[batch], labels[batch], multiplier)
        push, first = momentum.update(grads, states[0], weights)
        updates, second = descent.update(push, states[1], weights)
        return optax.apply_updates(weights, updates), (first, second), push

    weights = init_weights(seed, shapes_of(data.widths(widths)))
    states = momentum.init(weights), descent.init(weights)
    found = {}
    for count, batch in enumerate(order[: max(at) + 1]):
        moved, states, push = step(weights, states, batch)
        if count in at:
            pairs = zip(weights, push, strict=True)
            found[count] = [Given(_tall(w), _tall(gradient)) for w, gradient in pairs]
        weights = moved
    return found


def _tall(matrix: jax.Array) -> np.ndarray:
    rows, columns = matrix.shape
    return np.asarray(matrix.T if rows < columns else matrix)
