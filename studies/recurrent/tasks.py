"""Sequence tasks: recall, copy memory, adding, and images pixel by pixel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from studies.datasets import Dataset, load_digits, load_mnist

LETTERS = 8

Batch = tuple[Array, Array]


def choose(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Return cross-entropies, and where the largest logit is the label's."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, logits.argmax(-1) == labels


def approach(outputs: Any, values: Any) -> tuple[Any, Any]:
    """Return squared errors, and where they are below 0.01."""
    losses = jnp.square(outputs[..., 0] - values)
    return losses, losses < 0.01


@dataclasses.dataclass(frozen=True)
class Task:
    """A sequence task; `draw(seed, key, batch)` returns inputs (steps, batch, features) and labels
    (outputs, batch). Labels belong to the last steps. With `key=None` it draws held-out data.
    `judge` returns losses and right answers; `baseline` is the loss without memory, below a tenth
    of which the task is solved, or None. The planes of recurrent matrices turn by at most `angle`
    at the start: sums need slow ones."""

    draw: Callable[[Any, Any, int], Batch]
    steps: int
    features: int
    classes: int
    outputs: int
    judge: Callable[[Any, Any], tuple[Any, Any]] = choose
    baseline: float | None = None
    angle: float = np.pi


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

    steps = delay + 20
    baseline = 10 * float(np.log(LETTERS)) / steps
    return Task(draw, steps, LETTERS + 2, LETTERS + 1, steps, baseline=baseline)


def adding(steps: int) -> Task:
    """Add the two of `steps` uniform numbers that are marked, one in each half
    (arXiv:1511.06464)."""

    def draw(seed: Any, key: Any, batch: int) -> Batch:
        key = jax.random.key(seed + 10**6) if key is None else key
        keys = jax.random.split(key)
        numbers = jax.random.uniform(keys[0], (steps, batch))
        marked = jax.random.randint(keys[1], (2, batch), 0, steps // 2)
        marks = jax.nn.one_hot(marked + jnp.array([[0], [steps // 2]]), steps, axis=1).sum(0)
        return jnp.stack([numbers, marks], -1), (numbers * marks).sum(0)[None]

    return Task(draw, steps, 2, 1, 1, approach, 1 / 6, np.pi / 2)


def pixels(load: Callable[[], Dataset], angle: float, side: int, uses: int) -> Task:
    """Read images, shrunk to `side` by `side`, pixel by pixel, with equally many blank steps after
    each pixel. At most 2,000 are held out."""
    data = load()
    images = np.concatenate([data.train_x, data.test_x])
    full = images.shape[1]
    images = images.reshape(-1, side, full // side, side, full // side)
    images = images.mean((2, 4), dtype=np.float32).reshape(-1, side**2)
    images = jnp.asarray((images - images.mean()) / images.std(), jnp.float32)
    labels = jnp.asarray(np.concatenate([data.train_y, data.test_y]))
    train = len(data.train_x)

    def draw(seed: Any, key: Any, batch: int) -> Batch:
        order = jax.random.permutation(jax.random.key(seed), len(labels))
        held = order[train : train + 2000]
        rows = held if key is None else jax.random.choice(key, order[:train], (batch,))
        steps = jnp.zeros((side**2, uses // side**2, len(rows))).at[:, 0].set(images[rows].T)
        return steps.reshape(uses, -1, 1), labels[rows][None]

    return Task(draw, uses, 1, 10, 1, angle=angle)


TASKS: dict[str, Callable[[int], Task]] = {
    "recall": recall,
    "digits": functools.partial(pixels, load_digits, np.pi, 4),
}
"""Tasks of the rule, for a number of uses."""

LONGEST = {"recall": 256}
"""The most uses with which 400 steps learn the task, if there is a limit."""

RIVAL_TASKS: dict[str, Callable[[], Task]] = {
    "copy-100": functools.partial(copy, 100),
    "copy-300": functools.partial(copy, 300),
    "copy-1000": functools.partial(copy, 1000),
    "adding": functools.partial(adding, 200),
    "digits": functools.partial(pixels, load_digits, np.pi, 8, 64),
    "MNIST": functools.partial(pixels, load_mnist, 0.3, 28, 784),
}
