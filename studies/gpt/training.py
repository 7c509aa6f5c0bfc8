"""Training in compiled chunks of steps, timed; between them, untimed, the measurements."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.manifolds import EmbeddingRows
from manifoldmuon.modules import Module
from studies.datasets import Text, batches, windows
from studies.gpt.methods import METHODS, Job
from studies.gpt.settings import Settings

CHUNK = 20
"""Steps between two looks at the weights; a chunk keeps the weights of all its steps."""

NOTE = 5
"""Chunks between two points of the validation curve."""

PUBLISHED_WINDOWS = 240
"""The published validation loss is that of the first windows, each one character further."""


@dataclasses.dataclass
class Run:
    """One seed.

    Attributes:
      seed: of weights and order.
      train_loss: of every batch, before its step.
      step: where validation was measured.
      validation_curve: on the first 240 windows, at these steps.
      validation_first_windows: the same at the end.
      validation_whole: on windows side by side, which cover the validation part, at the end.
      distance: the largest from any manifold after any step; None without constrained manifolds.
      milliseconds_per_step: the median over the chunks.
      sample: text drawn from the trained network.
    """

    seed: int
    train_loss: list[float] = dataclasses.field(default_factory=list)
    step: list[int] = dataclasses.field(default_factory=list)
    validation_curve: list[float] = dataclasses.field(default_factory=list)
    validation_first_windows: float = float("nan")
    validation_whole: float = float("nan")
    distance: float | None = None
    milliseconds_per_step: float = float("nan")
    sample: str = ""

    @property
    def last_train_loss(self) -> float:
        """The training loss of the last batch alone."""
        return self.train_loss[-1]

    @property
    def late_train_loss(self) -> float:
        """The mean over the last hundred batches: one batch alone has an error of 0.05."""
        return float(np.mean(self.train_loss[-100:]))


class Trainer:
    """Trains and evaluates one network with one optimizer; compiled once for all seeds."""

    def __init__(self, settings: Settings, text: Text):
        self.settings = settings
        self.text = text
        self.job: Job = METHODS[settings.optimizer].job(settings, len(text.characters))
        self._chunk = jax.jit(chunk_of_steps(self.job, settings.context))
        self._mean_loss = jax.jit(mean_loss(self.job.network, settings.context))

    def train(self, seed: int, report: Callable[[Run, int], None]) -> tuple[Run, Any]:
        """Trains once; `report` is called after every chunk with the run and the chunk's length."""
        settings, run, milliseconds = self.settings, Run(seed), []
        weights = self.job.network.init(jax.random.key(seed))
        carry = weights, self.job.tx.init(weights)
        train = jnp.asarray(self.text.train)
        places = len(self.text.train) - settings.context
        order = batches(seed, places, settings.steps, settings.batch)
        for number, first in enumerate(range(0, settings.steps, CHUNK)):
            starts = jnp.asarray(order[first : first + CHUNK])
            if first == 0 or len(starts) < CHUNK:  # compile outside of the timed part
                jax.block_until_ready(self._chunk(carry, train, starts))
            start = time.perf_counter()
            carry, (losses, passed) = self._chunk(carry, train, starts)
            jax.block_until_ready(losses)
            milliseconds.append(1e3 * (time.perf_counter() - start) / len(starts))
            run.train_loss += np.asarray(losses, np.float64).tolist()
            self._watch(run, passed)
            if number % NOTE == NOTE - 1 and first + CHUNK < settings.steps:
                self._validate(run, carry[0])
            report(run, len(starts))
        self._validate(run, carry[0])
        run.validation_first_windows = run.validation_curve[-1]
        run.validation_whole = self.loss_of(carry[0], self.every_window())
        run.milliseconds_per_step = statistics.median(milliseconds)
        return run, carry[0]

    def loss_of(self, weights: Any, starts: Int[np.ndarray, " windows"]) -> float:
        """The mean loss over windows of the validation part."""
        tokens = jnp.asarray(self.text.validation)
        total = 0.0
        for part in np.array_split(starts, -(-len(starts) // PUBLISHED_WINDOWS)):
            total += float(self._mean_loss(weights, tokens, jnp.asarray(part))) * len(part)
        return total / len(starts)

    def every_window(self) -> Int[np.ndarray, " windows"]:
        """Windows side by side, which cover the validation part."""
        return np.arange(0, len(self.text.validation) - self.settings.context,
                         self.settings.context, dtype=np.int32)  # fmt: skip

    def _validate(self, run: Run, weights: Any) -> None:
        last = len(self.text.validation) - self.settings.context
        first = np.arange(min(PUBLISHED_WINDOWS, last), dtype=np.int32)
        run.step.append(len(run.train_loss))
        run.validation_curve.append(self.loss_of(weights, first))

    def _watch(self, run: Run, passed: Any) -> None:
        if self.job.constrained:
            found = largest_distance(self.job.network.geometry(), passed)
            run.distance = found if run.distance is None else float(np.maximum(run.distance, found))


class Steps(NamedTuple):
    """Measurements of each step of a chunk.

    Attributes:
      loss: of the batch, before the step.
      weights: after the step; None where no one looks at them.
    """

    loss: Float[Array, " steps"]
    weights: Any


def mean_loss(network: Module, context: int) -> Callable[..., Float[Array, ""]]:
    """`(weights, tokens, starts) -> ` the mean cross-entropy of the windows, in nats."""

    def loss(weights, tokens, starts):
        inputs, targets = windows(tokens, starts, context)
        scores = network.apply(weights, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    return loss


def chunk_of_steps(job: Job, context: int) -> Callable[..., tuple[Any, Steps]]:
    """A function that takes one step for each row of starts."""
    loss_and_grads = jax.value_and_grad(mean_loss(job.network, context))

    def chunk(carry, tokens, order):
        def step(carry, starts):
            weights, state = carry
            loss, grads = loss_and_grads(weights, tokens, starts)
            updates, state = job.tx.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            return (weights, state), Steps(loss, weights if job.constrained else None)

        return jax.lax.scan(step, carry, order)

    return chunk


def largest_distance(geometry: Any, weights: Any) -> float:
    """The distance of stacks of weights, relative to the scale of each manifold, in float64.

    By NumPy, one matrix at a time: independent batches of eigenvalue problems in one program of
    XLA's may wait for one another for ever on a CPU of two cores.
    """
    worst = [0.0]
    for manifold, w in zip(jax.tree.leaves(geometry), jax.tree.leaves(weights), strict=True):
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
