"""Training in timed, compiled chunks of steps, with untimed measurements between chunks."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import manifoldmuon as mm
from studies.classification import Weights, accuracy, cross_entropy, init_weights, shapes_of
from studies.datasets import FlatImages, batches
from studies.digits.methods import METHODS, PRESETS
from studies.digits.settings import Settings

# Chunks keep every step's weights for the measurements: at most this many numbers.
_KEPT = 2**26

Carry = tuple[Weights, Any]
"""Weights and optimizer state."""

CHUNKS = 20
"""Number of chunks in a run, hence of points on its curves."""


class Steps(NamedTuple):
    """Measurements of each step of a chunk.

    Attributes:
      loss: loss of the batch, before the step.
      weights: weights after the step.
      residual: largest residual of the layers; None without certificates.
      gap: largest gap of the layers; None without certificates.
    """

    loss: Float[Array, " steps"]
    weights: Any
    residual: Float[Array, " steps"] | None
    gap: Float[Array, " steps"] | None


@dataclasses.dataclass
class Run:
    """Measurements of a run: a single optimizer and seed.

    Attributes:
      step: number of steps taken: 0, and then after every chunk.
      train_loss: loss on the whole training part, at these steps.
      test_accuracy: accuracy on the whole test part, at these steps.
      largest: largest singular value of all layers at these steps, in float64.
      smallest: smallest singular value of all layers at these steps, in float64.
      distance: largest distance from the manifolds over the steps of each chunk; empty for
        optimizers without manifolds.
      residual: largest tangency residual over the steps of each chunk; empty without certificates.
      gap: largest gap to the steepest direction over the steps of each chunk; empty without
        certificates.
      milliseconds: time per step, in each chunk.
      spectral_norms: largest singular value of every layer at the end.
      frobenius_norms: Frobenius norm of every layer at the end.
    """

    step: list[int] = dataclasses.field(default_factory=list)
    train_loss: list[float] = dataclasses.field(default_factory=list)
    test_accuracy: list[float] = dataclasses.field(default_factory=list)
    largest: list[float] = dataclasses.field(default_factory=list)
    smallest: list[float] = dataclasses.field(default_factory=list)
    distance: list[float] = dataclasses.field(default_factory=list)
    residual: list[float] = dataclasses.field(default_factory=list)
    gap: list[float] = dataclasses.field(default_factory=list)
    milliseconds: list[float] = dataclasses.field(default_factory=list)
    spectral_norms: list[float] = dataclasses.field(default_factory=list)
    frobenius_norms: list[float] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once the last step was taken."""
        return bool(self.spectral_norms)

    @property
    def spectral_product(self) -> float:
        """Product of the layers' spectral norms at the end."""
        return float(np.prod(self.spectral_norms))

    @property
    def pace(self) -> float:
        """Median milliseconds per step, without the first chunk (warm-up) if there are others."""
        return statistics.median(self.milliseconds[1:] or self.milliseconds)


class Trainer:
    """Trainer for an optimizer; compiled once for all seeds, which have data of equal shapes.

    Attributes:
      compile_seconds: compile time.
      table: summary table of weights and geometry; None for AdamW, which has no geometry.
    """

    def __init__(self, settings: Settings, optimizer: str, example: FlatImages):
        method = METHODS[optimizer]
        self.settings = settings
        self.shapes = shapes_of(example.widths(settings.widths))
        geometry = method.geometry and method.geometry(self.shapes, PRESETS[settings.preset])
        schedule = optax.linear_schedule(settings.learning_rate(optimizer), 0.0, settings.steps)
        self._tx = method.build(schedule, geometry)
        self._evaluate = jax.jit(_evaluation(settings.multiplier))
        self._distance = jax.jit(_largest_distance(geometry)) if method.constrained else None
        self._chunk = jax.jit(chunk_of_steps(self._tx, settings.multiplier, geometry is not None))
        self._lengths = chunk_lengths(settings.steps, sum(a * b for a, b in self.shapes))
        self._ends = [0, *itertools.accumulate(self._lengths)]
        weights = self.start(0)[0]
        self.table = None if geometry is None else mm.optim.tabulate(geometry, weights)
        self.compile_seconds = self._compile(example)

    def _compile(self, data: FlatImages) -> float:
        start = time.perf_counter()
        carry = self.start(0)
        order = np.zeros((self.settings.steps, self.settings.batch_size), np.int32)
        self._compiled = {
            length: self._chunk.lower(carry, data.train_x, data.train_y, order[:length]).compile()
            for length in set(self._lengths)
        }
        return time.perf_counter() - start

    def start(self, seed: int) -> Carry:
        """Return the initial weights and optimizer state."""
        weights = init_weights(seed, self.shapes)
        return weights, self._tx.init(weights)

    def train(
        self,
        data: FlatImages,
        seed: int,
        report: Callable[[int, Carry], None],
        run: Run,
        carry: Carry | None = None,
    ) -> None:
        """Train once, or resume.

        Args:
          data: images of this seed.
          seed: seed of the initial weights and of the order of the data.
          report: function called after every chunk with its length, and weights and state.
          run: measurements to append to; new, or from an unfinished run.
          carry: weights and state of the unfinished run.
        """
        order = batches(seed, len(data.train_y), self.settings.steps, self.settings.batch_size)
        arrays = tuple(jnp.asarray(part) for part in data[:4])
        weights, state = carry or self.start(seed)
        if carry is None:
            self._note(run, 0, weights, arrays)
        done = run.step[-1]
        for length in self._lengths[self._ends.index(done) :]:
            batch = jnp.asarray(order[done : done + length])
            start = time.perf_counter()
            (weights, state), steps = self._compiled[length]((weights, state), *arrays[:2], batch)
            jax.block_until_ready(steps)
            run.milliseconds.append(1e3 * (time.perf_counter() - start) / length)
            done += length
            self._note(run, done, weights, arrays)
            self._certify(run, steps)
            if done == self.settings.steps:
                for values in singular_values(weights):
                    run.spectral_norms.append(float(values[0]))
                    run.frobenius_norms.append(float(np.linalg.norm(values)))
            report(length, (weights, state))

    def _note(self, run: Run, step: int, weights: Weights, arrays: tuple[Any, ...]) -> None:
        loss, correct = self._evaluate(weights, *arrays)
        values = np.concatenate(singular_values(weights))
        run.step.append(step)
        run.train_loss.append(float(loss))
        run.test_accuracy.append(float(correct))
        run.largest.append(float(values.max()))
        run.smallest.append(float(values.min()))

    def _certify(self, run: Run, steps: Steps) -> None:
        if self._distance is not None:
            run.distance.append(float(np.max(self._distance(steps.weights))))
        for curve, values in ((run.residual, steps.residual), (run.gap, steps.gap)):
            if values is not None:
                curve.append(float(np.max(values)))


def chunk_lengths(steps: int, numbers: int) -> list[int]:
    """Return the number of steps of each chunk, for a network with `numbers` parameters."""
    length = max(1, min(-(-steps // CHUNKS), _KEPT // numbers))
    whole, rest = divmod(steps, length)
    return [length] * whole + [rest] * (rest > 0)


def chunk_of_steps(
    tx: optax.GradientTransformation, multiplier: float, certified: bool
) -> Callable[..., tuple[Any, Steps]]:
    """Return a function that takes a step for each row of a matrix of indices."""

    def chunk(carry, images, labels, order):
        def step(carry, batch):
            weights, state = carry
            loss, grads = jax.value_and_grad(cross_entropy)(
                weights, images[batch], labels[batch], multiplier
            )
            updates, state = tx.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            if not certified:
                return (weights, state), Steps(loss, weights, None, None)
            report = mm.optim.monitor(state)
            worst = [_largest(report[name]) for name in ("residual", "gap")]
            return (weights, state), Steps(loss, weights, *worst)

        return jax.lax.scan(step, carry, order)

    return chunk


def singular_values(weights: Weights) -> list[np.ndarray]:
    """Return every layer's singular values in float64, descending; NaN after divergence."""
    wide = [np.asarray(weight, np.float64) for weight in weights]
    return [
        np.linalg.svd(x, compute_uv=False)
        if np.isfinite(x).all()  # LAPACK would raise
        else np.full(min(x.shape), np.nan)
        for x in wide
    ]


def _largest(certificate: dict[str, jax.Array]) -> jax.Array:
    return jnp.max(jnp.stack(list(certificate.values())))


def _evaluation(multiplier: float) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def evaluate(weights, train_x, train_y, test_x, test_y):
        loss = cross_entropy(weights, train_x, train_y, multiplier)
        return loss, accuracy(weights, test_x, test_y)

    return evaluate


def _largest_distance(geometry: Any) -> Callable[[Weights], jax.Array]:
    """Return a function from the weights after several steps to each step's largest distance."""

    def farthest(weights: Weights) -> jax.Array:
        return _largest(mm.optim.monitor_distance(geometry, weights))

    return functools.partial(jax.lax.map, farthest)
