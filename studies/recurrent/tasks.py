"""Sequence tasks: recall, copy memory, and digits pixel by pixel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from studies.datasets import load_digits

LETTERS = 8

Batch = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """A sequence task; `draw(seed, key, batch)` returns inputs (steps, batch, features) and labels
    (outputs, batch). Labels belong to the last steps. With `key=None` it draws held-out data."""

    draw: Callable[[Any, Any, int], Batch]
    steps: int
    features: int
    classes: int
    outputs: int


def recall(uses: int) -> Task:
    """Read five letters, and return them at the last five of `uses` steps."""

    def draw(seed: Any, key: Any, batch: int) -> Batch:
        key = jax.random.key(seed + 10**6) if key is None else key
        letters = jax.random.randint(key, (5, batch), 0, LETTERS)
        signal = jnp.full((uses - 5, batch), -1).at[-5:].set(LETTERS)  # -1: no input
        return jax.nn.one_hot(jnp.concatenate([letters, signal]), LETTERS + 1), letters

    return Task(draw, uses, LETTERS + 1, LETTERS, 5)


def copy(delay: int) -> Task:
    """Copy memory (arXiv:1511.06464): ten letters, a delay, a signal, then the letters again; every
    step counts."""

    def draw(seed: Any, key: Any, batch: int) -> Batch:
        key = jax.random.key(seed + 10**6) if key is None else key
        letters = jax.random.randint(key, (10, batch), 1, LETTERS + 1)
        blank = jnp.zeros((delay + 10, batch), int)
        signal = blank.at[delay - 1].set(LETTERS + 1)
        inputs = jax.nn.one_hot(jnp.concatenate([letters, signal]), LETTERS + 2)
        return inputs, jnp.concatenate([blank, letters])

    return Task(draw, delay + 20, LETTERS + 2, LETTERS + 1, delay + 20)


def pixels(uses: int, side: int) -> Task:
    """Read scikit-learn's digits, shrunk to `side` by `side`, pixel by pixel, with equally many
    blank steps after each pixel."""
    data = load_digits()
    images = np.concatenate([data.train_x, data.test_x]).reshape(
        -1, side, 8 // side, side, 8 // side
    )
    images = images.mean((2, 4)).reshape(-1, side**2)
    images = jnp.asarray((images - images.mean()) / images.std(), jnp.float32)
    labels = jnp.asarray(np.concatenate([data.train_y, data.test_y]))
    train = len(data.train_x)

    def draw(seed: Any, key: Any, batch: int) -> Batch:
        order = jax.random.permutation(jax.random.key(seed), len(labels))
        rows = order[train:] if key is None else jax.random.choice(key, order[:train], (batch,))
        steps = jnp.zeros((side**2, uses // side**2, len(rows))).at[:, 0].set(images[rows].T)
        return steps.reshape(uses, -1, 1), labels[rows][None]

    return Task(draw, uses, 1, 10, 1)


TASKS: dict[str, Callable[[int], Task]] = {
    "recall": recall,
    "digits": functools.partial(pixels, side=4),
}
"""Tasks of the rule, for a number of uses."""

LONGEST = {"recall": 256}
"""The most uses with which 400 steps learn the task, if there is a limit."""

RIVAL_TASKS: dict[str, Callable[[], Task]] = {
    "copy-100": functools.partial(copy, 100),
    "copy-300": functools.partial(copy, 300),
    "digits": functools.partial(pixels, 64, side=8),
}
