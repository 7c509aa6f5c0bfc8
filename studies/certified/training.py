"""Train a network by a method, in chunks of steps with measured CPU time."""

import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.modules import Module
from manifoldmuon.robustness import margin_cross_entropy
from studies.certified.methods import BIASES, BIASES_MOMENTUM, SQUARES, Method
from studies.certified.networks import Architecture
from studies.datasets import Dataset, batches

CHUNK = 10
"""Steps per call of the compiled program."""

PAIRS = 15
"""Chunks of each of two trainings, run in turn to compare their CPU times."""


class Training(NamedTuple):
    """The hashable settings of a training: the cache key of its compiled program.

    Attributes:
      method: trains the matrices.
      architecture: builds the network.
      image: the shape of an image.
      classes: the number of classes.
      batch: images per step.
      offset: the offset of the label's logit in the loss.
      temperature: the temperature of the loss.
      radii: the radii at which accuracies are measured.
    """

    method: Method
    architecture: Architecture
    image: tuple[int, ...]
    classes: int
    batch: int
    offset: float
    temperature: float
    radii: tuple[float, ...]

    def network(self) -> Module:
        """Return the network; unconstrained if the method does not use manifolds."""
        net = self.architecture.network(self.image, self.classes, self.method.solver)
        return net if self.method.on_manifolds else net.unconstrained()

    def train(
        self, data: Dataset, rate: float, momentum: float, seed: int, steps: int
    ) -> "Trained":
        """Train for `steps` steps, a multiple of `CHUNK`, with cosine decay of the rate to zero."""
        carry, total = None, 0.0
        for last, seconds in self._chunks(data, rate, momentum, seed, steps):
            carry, total = last, total + seconds
        return Trained(_program(self).weights(carry), total, steps)

    def relative_time(self, first: "Training", data: Dataset) -> "RelativeTime":
        """Compare the CPU time of a step with `first`.

        Chunks of both run in turn, so that other work on the machine slows both equally.
        """

        def seconds(training: Training) -> Iterator[float]:
            rate = 2.0**training.method.log2_rate
            for _, taken in training._chunks(data, rate, 0.9, 0, PAIRS * CHUNK):
                yield taken

        pairs = np.array(list(zip(seconds(first), seconds(self), strict=True)))
        quartiles = np.quantile(pairs[:, 1] / pairs[:, 0], (0.25, 0.5, 0.75))
        return RelativeTime(float(np.median(pairs[:, 0])), quartiles.tolist())

    def _chunks(
        self, data: Dataset, rate: float, momentum: float, seed: int, steps: int
    ) -> Iterator[tuple["_Carry", float]]:
        """Yield the carry after each chunk and the CPU seconds of the chunk."""
        program = _program(self)
        images, labels = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
        # Dispatch is asynchronous: without waiting, initialisation would be timed as well.
        carry = jax.block_until_ready(program.begin(jax.random.key(seed)))
        order = batches(seed, len(data.train_y), steps, self.batch)
        for start in range(0, steps, CHUNK):
            chosen = jnp.asarray(order[start : start + CHUNK])
            run = program.compiled(carry, images, labels, chosen)
            numbers = np.int32(start), np.int32(steps), np.float32(rate), np.float32(momentum)
            begun = time.process_time()
            carry = jax.block_until_ready(run(carry, images, labels, chosen, *numbers))
            yield carry, time.process_time() - begun


class RelativeTime(NamedTuple):
    """The CPU time of a step relative to another training.

    Attributes:
      reference: CPU seconds of `CHUNK` steps of the other training.
      quartiles: the quartiles of the ratio.
    """

    reference: float
    quartiles: list[float]

    @property
    def seconds(self) -> float:
        """Return the CPU seconds of `CHUNK` steps, by the median ratio."""
        return self.reference * self.quartiles[1]


class Trained(NamedTuple):
    """Results of training.

    Attributes:
      weights: the trained weights.
      seconds: the CPU time of all threads, without compilation.
      steps: the number of steps.
    """

    weights: Any
    seconds: float
    steps: int


class _Carry(NamedTuple):
    """State carried between steps: trained arrays, carries of the method, biases, optimizer
    states."""

    free: list[Any]
    carried: list[Any]
    biases: list[Any]
    states: tuple[Any, Any]


class _Program:
    """Compiled functions of a training: initialisation, steps, and weights."""

    def __init__(self, training: Training):
        self.training = training
        self.net = training.network()
        method, image = training.method, training.image
        rigid = training.architecture.network(image, training.classes, method.solver)
        shapes = jax.eval_shape(rigid.init, jax.random.key(0))
        self.structure = jax.tree.structure(shapes)
        specs = jax.tree.leaves(rigid.weights())
        self.matrix = [spec.manifold.constrained for spec in specs]
        self.manifolds = [spec.entry() for spec in specs if spec.manifold.constrained]
        self.first = rigid.init
        self.begin = jax.jit(self._begin)
        self.weights = jax.jit(self._weights)
        self.chunk = jax.jit(self._chunk)
        self._compiled: dict[Any, Any] = {}

    def compiled(self, *arguments: Any) -> Any:
        """Compile for these array sizes in advance, so that compilation is not timed."""
        key = tuple(x.shape for x in arguments[1:])
        if key not in self._compiled:
            numbers = np.int32(0), np.int32(1), np.float32(0), np.float32(0)
            self._compiled[key] = self.chunk.lower(*arguments, *numbers).compile()
        return self._compiled[key]

    def _begin(self, key: Any) -> _Carry:
        leaves = list(zip(self.structure.flatten_up_to(self.first(key)), self.matrix, strict=True))
        pairs = [self.training.method.begin(leaf) for leaf, matrix in leaves if matrix]
        biases = [leaf for leaf, matrix in leaves if not matrix]
        free, carried = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        first, second = self._optimizers(0.0, 0.0, 0.0)
        return _Carry(free, carried, biases, (first.init(free), second.init(biases)))

    def _weights(self, carry: _Carry) -> Any:
        pairs = zip(carry.free, carry.carried, strict=True)
        matrices = iter([self.training.method.weight(*pair) for pair in pairs])
        biases = iter(carry.biases)
        return self.structure.unflatten(
            next(matrices) if matrix else next(biases) for matrix in self.matrix
        )

    def _optimizers(self, share: Any, rate: Any, momentum: Any) -> tuple[Any, Any]:
        matrices = self.training.method.optimizer(rate * share, momentum, self.manifolds)
        return matrices, optax.adam(BIASES * share, BIASES_MOMENTUM, SQUARES)

    def _chunk(
        self, carry: _Carry, images: Any, labels: Any, order: Any,
        start: Any, steps: Any, rate: Any, momentum: Any,
    ) -> _Carry:  # fmt: skip
        training, method = self.training, self.training.method

        def loss(free: Any, biases: Any, carry: _Carry, x: Any, y: Any) -> Any:
            weights = self._weights(carry._replace(free=free, biases=biases))
            logits = self.net.apply(weights, x)
            losses = margin_cross_entropy(logits, y, training.offset, training.temperature)
            return jnp.mean(losses)

        def step(carry: _Carry, now: Any) -> Any:
            count, chosen = now
            pairs = zip(carry.free, carry.carried, strict=True)
            carry = carry._replace(carried=[method.carried(*pair) for pair in pairs])
            free, _, biases, states = carry
            grads = jax.grad(loss, (0, 1))(free, biases, carry, images[chosen], labels[chosen])
            share = 0.5 * (1 + jnp.cos(jnp.pi * count / steps))
            first, second = self._optimizers(share, rate, momentum)
            moves, state = first.update(grads[0], states[0], free)
            shifts, other = second.update(grads[1], states[1], biases)
            free = optax.apply_updates(free, moves)
            biases = optax.apply_updates(biases, shifts)
            return carry._replace(free=free, biases=biases, states=(state, other)), None

        return jax.lax.scan(step, carry, (start + jnp.arange(len(order)), order))[0]


_program = functools.lru_cache(maxsize=2)(_Program)
