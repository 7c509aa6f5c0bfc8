"""What a Stiefel solver is given along a training run: weights and momenta, step by step."""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.lab._classifier import cross_entropy, init_weights, shapes_of
from manifoldmuon.lab._images import Data, batches
from manifoldmuon.optim import manifold_muon


class Given(NamedTuple):
    """One step of one layer, tall as the solvers take it (a wide layer is transposed); float32.

    Attributes:
      point: a weight W on the Stiefel manifold of scale 1.
      gradient: the momentum there; at step 0 the gradient of one batch.
    """

    point: np.ndarray
    gradient: np.ndarray


def trajectory(
    data: Data,
    widths: tuple[int, ...],
    geometry: Any,
    rate: float,
    steps: int,
    batch_size: int,
    multiplier: float,
    seed: int,
    at: Collection[int],
) -> dict[int, list[Given]]:
    """Trains with manifold Muon and keeps what its solver is given.

    Args:
      data: the images.
      widths: of the hidden layers.
      geometry: of the weights: Stiefel manifolds of scale 1.
      rate: the first learning rate; it falls linearly to zero over the steps.
      steps: of the schedule; training ends after the last of `at`.
      batch_size: images per step.
      multiplier: of the last layer.
      seed: of the initial weights and of the order of the images.
      at: the steps to keep, counted from 0.

    Returns:
      For each step to keep, one entry per layer.
    """
    images, labels = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    order = batches(seed, len(data.train_y), steps, batch_size)
    # manifold_muon in two parts, so that the momentum between them can be seen.
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
