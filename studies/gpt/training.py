"""Training in timed, compiled chunks of steps, with untimed measurements between chunks."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.manifolds import EmbeddingRows
from manifoldmuon.modules import Module
from studies.datasets import Text, batches, windows
from studies.gpt.methods import METHODS, Job
from studies.training import begin, train

CHUNK = 20
"""Steps between measurements of the weights; a chunk keeps the weights of all its steps."""

NOTE = 5
"""Chunks between points of the validation curve."""

PUBLISHED_WINDOWS = 240
"""Number of windows in the published validation loss: the first windows, one character apart."""


def run(settings: Any, text: Text, seed: int) -> tuple[dict[str, Any], Any]:
    """Train once, and return measurements and weights.

    Args:
      settings: a `CharacterGPT`.
      text: the text.
      seed: seed of the initial weights and of the order of the windows.

    Returns:
      The weights, and: `train_loss` of every batch, before its step; `validation_curve`, the loss
      on the first 240 windows, at the steps `step`, and `validation_first_windows`, its end;
      `validation_whole`, the loss on adjacent windows that cover the validation part, at the end;
      `distance`, the largest from any manifold after any step (None without manifolds);
      `milliseconds_per_step`, the median over the chunks.
    """
    job, chunk, loss = _program(settings, len(text.characters))
    train_tokens, rest = jnp.asarray(text.train), jnp.asarray(text.validation)
    every = np.arange(0, len(rest) - settings.context, settings.context, dtype=np.int32)
    first = np.arange(min(PUBLISHED_WINDOWS, len(rest) - settings.context), dtype=np.int32)

    def validate(starts: Int[np.ndarray, " windows"]) -> float:
        parts = np.array_split(starts, -(-len(starts) // PUBLISHED_WINDOWS))
        return sum(float(loss(carry[0], rest, p)) * len(p) for p in parts) / len(starts)

    carry = begin(job.tx, job.network.init(jax.random.key(seed)))
    places = len(text.train) - settings.context
    order = batches(seed, places, settings.steps, settings.batch)
    losses, milliseconds, steps, curve, distance = [], [], [], [], None
    for number, start in enumerate(range(0, settings.steps, CHUNK)):
        starts = jnp.asarray(order[start : start + CHUNK])
        if start == 0 or len(starts) < CHUNK:  # compile outside of the timed part
            jax.block_until_ready(chunk(carry, train_tokens, starts))
        begun = time.perf_counter()
        carry, (found, passed) = jax.block_until_ready(chunk(carry, train_tokens, starts))
        milliseconds.append(1e3 * (time.perf_counter() - begun) / len(starts))
        losses += np.asarray(found, np.float64).tolist()
        if job.constrained:
            far = largest_distance(job.network, passed)
            distance = far if distance is None else float(np.maximum(distance, far))
        last = start + CHUNK >= settings.steps
        if number % NOTE == NOTE - 1 or last:
            steps.append(len(losses))
            curve.append(validate(first))
    measured = {
        "train_loss": losses,
        "step": steps,
        "validation_curve": curve,
        "validation_first_windows": curve[-1],
        "validation_whole": validate(every),
        "distance": distance,
        "milliseconds_per_step": statistics.median(milliseconds),
    }
    return measured, carry[0]


@functools.lru_cache(maxsize=1)
def _program(settings: Any, vocabulary: int) -> tuple[Job, Any, Any]:
    job = METHODS[settings.optimizer].job(settings, vocabulary)
    loss = mean_loss(job.network, settings.context)
    return job, jax.jit(chunk_of_steps(job, settings.context)), jax.jit(loss)


def mean_loss(network: Module, context: int) -> Callable[..., Float[Array, ""]]:
    """Return `(weights, tokens, starts) ->` mean cross-entropy of the windows, in nats."""

    def loss(weights, tokens, starts):
        inputs, targets = windows(tokens, starts, context)
        scores = network.apply(weights, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    return loss


def chunk_of_steps(job: Job, context: int) -> Callable[..., Any]:
    """Return a function that takes a step for each row of starts; it also returns losses and, with
    constraints, the weights after each step."""
    mean = mean_loss(job.network, context)

    def chunk(carry, tokens, order):
        def loss(weights, starts):
            return mean(weights, tokens, starts)

        def measure(weights, state):
            return weights if job.constrained else None

        return train(job.tx, loss, carry, order, measure)

    return chunk


def largest_distance(network: Any, weights: Any) -> float:
    """Return the largest distance in stacks of weights, relative to the manifolds' scales.

    Computed in float64 by NumPy, a matrix at a time: independent batches of eigenvalue problems
    in a single XLA program can deadlock on a CPU with two cores.
    """
    worst = [0.0]
    specs = jax.tree.leaves(network.weights())
    for manifold, w in zip([x.manifold for x in specs], jax.tree.leaves(weights), strict=True):
        wide = np.asarray(w, np.float64)
        if not np.isfinite(wide).all():  # LAPACK would raise
            return float("nan")
        if isinstance(manifold, EmbeddingRows):
            sizes = np.sqrt(np.mean(wide**2, axis=-1))
        else:
            m, n = wide.shape[-2:]
            small = np.swapaxes(wide, -1, -2) @ wide if m > n else wide @ np.swapaxes(wide, -1, -2)
            sizes = np.sqrt(np.linalg.eigvalsh(small * (n / m)))
        worst.append(float(np.abs(sizes - 1).max()))
    return float(np.max(worst))
