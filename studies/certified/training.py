"""Train networks by a method: several trials in one program, in chunks of steps."""

import collections
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.modules import Module
from manifoldmuon.robustness import margin_cross_entropy
from studies.certified.methods import BIASES, BIASES_MOMENTUM, SQUARES, Method, UnitRows
from studies.certified.networks import UNIT_ROWS, Architecture
from studies.datasets import Dataset, batches

CHUNK = 10
"""Steps per call of the compiled program."""

PAIRS = 7
"""Chunks of each of two trainings, run in turn to compare their CPU times."""


class Trial(NamedTuple):
    """The numbers of a training, which a compiled program takes as arguments.

    Attributes:
      rate: the peak learning rate.
      momentum: the momentum; for Adam, the decay of the first moment.
      offset: the offset of the label's logit in the loss.
      temperature: the temperature of the loss.
      seed: the seed of weights, batches and augmentation.
    """

    rate: float
    momentum: float
    offset: float
    temperature: float
    seed: int


class Training(NamedTuple):
    """The hashable settings of a training: the cache key of its compiled program.

    Attributes:
      method: trains the matrices.
      architecture: builds the network.
      image: the shape of an image.
      classes: the number of classes.
      batch: images per step.
      crop: the largest shift of a training image, in pixels; zeros come in.
      flip: whether half of the training images are mirrored.
    """

    method: Method
    architecture: Architecture
    image: tuple[int, ...]
    classes: int
    batch: int
    crop: int
    flip: bool

    def network(self) -> Module:
        """Return the network; unconstrained if the method does not use manifolds."""
        net = self.architecture.network(self.image, self.classes, self.method.solver)
        return net if self.method.on_manifolds else net.unconstrained()

    def train(self, data: Dataset, trials: Sequence[Trial], steps: int) -> list[Any]:
        """Train for `steps` steps, with cosine decay of the rate to zero; return all weights.

        `steps` is a multiple of `CHUNK`. An accelerator trains all trials in one program, a CPU one
        after the other: its products of stacks are slow.
        """
        if jax.default_backend() == "cpu" and len(trials) > 1:
            return [self.train(data, [trial], steps)[0] for trial in trials]
        carry, _ = collections.deque(self._chunks(data, trials, steps), maxlen=1).pop()
        weights = jax.device_get(program_of(self).weights(carry))
        return [jax.tree.map(lambda x, k=k: x[k], weights) for k in range(len(trials))]

    def relative_time(self, first: "Training", data: Dataset) -> "RelativeTime":
        """Compare the CPU time of a step with `first`.

        Chunks of both run in turn, so that other work on the machine slows both equally.
        """

        def seconds(training: Training) -> Iterator[float]:
            trial = Trial(2.0**training.method.log2_rate, 0.9, 1.0, 1.0, 0)
            for _, taken in training._chunks(data, [trial], PAIRS * CHUNK):
                yield taken

        pairs = np.array(list(zip(seconds(first), seconds(self), strict=True)))
        quartiles = np.quantile(pairs[:, 1] / pairs[:, 0], (0.25, 0.5, 0.75))
        return RelativeTime(float(np.median(pairs[:, 0])), quartiles.tolist())

    def _chunks(
        self, data: Dataset, trials: Sequence[Trial], steps: int
    ) -> Iterator[tuple["_Carry", float]]:
        """Yield the carry after each chunk and the CPU seconds of the chunk."""
        program = program_of(self)
        images, labels = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
        keys = jnp.stack([jax.random.key(trial.seed) for trial in trials])
        numbers = jnp.array([trial[:-1] for trial in trials], jnp.float32)
        # Dispatch is asynchronous: without waiting, initialisation would be timed as well.
        carry = jax.block_until_ready(program.begin(keys))
        orders = [batches(t.seed, len(data.train_y), steps, self.batch) for t in trials]
        order = np.stack(orders)
        for start in range(0, steps, CHUNK):
            chosen = jnp.asarray(order[:, start : start + CHUNK])
            given = carry, numbers, keys, chosen, images, labels, np.int32(start), np.int32(steps)
            run = program.compiled(*given)
            begun = time.process_time()
            carry = jax.block_until_ready(run(*given))
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


class _Carry(NamedTuple):
    """State carried between steps: trained arrays, carries of the methods, biases, optimizer
    states."""

    free: list[Any]
    carried: list[Any]
    biases: list[Any]
    states: tuple[Any, Any]


class _Program:
    """Compiled functions of a training: initialisation, steps, and weights, of many trials."""

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
        rows = method if method.on_manifolds else UnitRows(method.log2_rate)
        self.methods = [rows if spec.manifold == UNIT_ROWS else method
                        for spec in specs if spec.manifold.constrained]  # fmt: skip
        self.first = rigid.init
        self.begin = jax.jit(jax.vmap(self._begin))
        self.weights = jax.jit(jax.vmap(self._weights))
        self.chunk = jax.jit(jax.vmap(self._chunk, in_axes=(0, 0, 0, 0, None, None, None, None)))
        self._compiled: dict[Any, Any] = {}

    def compiled(self, *given: Any) -> Any:
        """Compile for these array sizes in advance, so that compilation is not timed."""
        key = tuple(np.shape(x) for x in given[1:])
        if key not in self._compiled:
            self._compiled[key] = self.chunk.lower(*given).compile()
        return self._compiled[key]

    def _begin(self, key: Any) -> _Carry:
        leaves = list(zip(self.structure.flatten_up_to(self.first(key)), self.matrix, strict=True))
        matrices = [leaf for leaf, matrix in leaves if matrix]
        pairs = [method.begin(leaf) for method, leaf in zip(self.methods, matrices, strict=True)]
        biases = [leaf for leaf, matrix in leaves if not matrix]
        free, carried = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        first, second = self._optimizers(0.0, 0.0, 0.0)
        return _Carry(free, carried, biases, (first.init(free), second.init(biases)))

    def _weights(self, carry: _Carry) -> Any:
        each = zip(self.methods, carry.free, carry.carried, strict=True)
        matrices = iter([method.weight(free, carried) for method, free, carried in each])
        biases = iter(carry.biases)
        return self.structure.unflatten(
            next(matrices) if matrix else next(biases) for matrix in self.matrix
        )

    def _optimizers(self, share: Any, rate: Any, momentum: Any) -> tuple[Any, Any]:
        matrices = self.training.method.optimizer(rate * share, momentum, self.manifolds)
        return matrices, optax.adam(BIASES * share, BIASES_MOMENTUM, SQUARES)

    def _augmented(self, key: Any, images: Any) -> Any:
        crop, flip = self.training.crop, self.training.flip
        first, second = jax.random.split(key)
        if crop:
            sides = jnp.pad(images, ((0, 0), (crop, crop), (crop, crop), (0, 0)))
            corners = jax.random.randint(first, (len(images), 2), 0, 2 * crop + 1)
            size = images.shape[1:]
            images = jax.vmap(
                lambda x, at: jax.lax.dynamic_slice(x, (at[0], at[1], 0), size)
            )(sides, corners)  # fmt: skip
        if flip:
            mirrored = jax.random.bernoulli(second, shape=(len(images), 1, 1, 1))
            images = jnp.where(mirrored, images[:, :, ::-1], images)
        return images

    def _chunk(
        self, carry: _Carry, numbers: Any, key: Any, order: Any,
        images: Any, labels: Any, start: Any, steps: Any,
    ) -> _Carry:  # fmt: skip
        rate, momentum, offset, temperature = numbers

        def loss(free: Any, biases: Any, carry: _Carry, x: Any, y: Any) -> Any:
            weights = self._weights(carry._replace(free=free, biases=biases))
            logits = self.net.apply(weights, x)
            return jnp.mean(margin_cross_entropy(logits, y, offset, temperature))

        def step(carry: _Carry, now: Any) -> Any:
            count, chosen = now
            each = zip(self.methods, carry.free, carry.carried, strict=True)
            carry = carry._replace(carried=[method.carried(*pair) for method, *pair in each])
            free, _, biases, states = carry
            x = self._augmented(jax.random.fold_in(key, count), images[chosen])
            grads = jax.grad(loss, (0, 1))(free, biases, carry, x, labels[chosen])
            share = 0.5 * (1 + jnp.cos(jnp.pi * count / steps))
            first, second = self._optimizers(share, rate, momentum)
            moves, state = first.update(grads[0], states[0], free)
            shifts, other = second.update(grads[1], states[1], biases)
            free = optax.apply_updates(free, moves)
            biases = optax.apply_updates(biases, shifts)
            return carry._replace(free=free, biases=biases, states=(state, other)), None

        return jax.lax.scan(step, carry, (start + jnp.arange(len(order)), order))[0]


program_of = functools.lru_cache(maxsize=2)(_Program)
