"""Common parts of the programs in this folder: images, loss, and results of a training."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.optim import Table
from studies.datasets import batches, load_digits, standardise


class Trained(NamedTuple):
    """Results of a training.

    Attributes:
      losses: the loss on each batch before its update.
      distances: final distances of the weights from their manifolds, by path.
      table: summary table of parameters and manifolds.
    """

    losses: list[float]
    distances: dict[str, jax.Array]
    table: Table

    def __str__(self) -> str:
        first, last = self.losses[0], sum(self.losses[-10:]) / 10
        farthest = max(map(float, self.distances.values()))
        return f"{self.table}\n\nloss {first:.3f} -> {last:.3f}, farthest weight {farthest:.1e}"


def minibatches(steps: int, size: int = 128) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield standardised images `(size, 8, 8, 1)` and their labels for every step."""
    data = standardise(load_digits())
    for chosen in batches(0, len(data.train_y), steps, size):
        images = data.train_x[chosen].reshape(size, 8, 8, 1)
        yield jnp.asarray(images), jnp.asarray(data.train_y[chosen])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy over all labels, in float32."""
    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean()
