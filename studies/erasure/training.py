"""Train a network with a letter in its middle matrix, and measure the letter's erasure."""

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.lab import erasure_auc, letter_mask, stable_rank
from manifoldmuon.linalg import msign
from manifoldmuon.manifolds import Manifold, Stiefel
from manifoldmuon.norms import FanRatio
from manifoldmuon.optim import init_tree
from studies.classification import Weights, accuracy, logits, shapes_of
from studies.datasets import load_cifar10, load_digits, load_mnist
from studies.erasure.methods import MIDDLE, SIX_STEPS, Update, method_of
from studies.erasure.ratio import erasure_ratio

PUBLISHED_IMAGES = 3072
"""The published sampler uses the number of pixels as the number of images."""

# AUC levels, from a sharp letter (1) to none (0.5); the published experiment judges by eye.
READABLE, HALF, GONE, NO_LETTER = 0.9, 0.75, 0.6, 0.5

Part = tuple[Float[Array, "images pixels"], Int[Array, " images"]]


class Problem(NamedTuple):
    """Data, shapes and mask shared by all methods.

    Attributes:
      train: flattened training images between 0 and 1, and their classes.
      test: flattened test images and their classes.
      shapes: the shapes of the matrices.
      mask: the mask of the middle matrix, zero on the letter.
    """

    train: Part
    test: Part
    shapes: tuple[tuple[int, int], ...]
    mask: np.ndarray


class Protocol(NamedTuple):
    """Settings of the training.

    Attributes:
      rate: the constant learning rate.
      steps: the number of steps.
      batch: images per step, drawn with replacement.
      rounds: rounds of masking and projecting that bring the middle matrix onto a manifold.
      seed: seeds the weights and the batches.
    """

    rate: float
    steps: int
    batch: int
    rounds: int
    seed: int


@functools.lru_cache(maxsize=2)
def problem(data: str, folder: Path | None, everything: bool, widths: tuple[int, ...]) -> Problem:
    """Load the images, and set up a network with hidden layers of these widths.

    Raises:
      DatasetError: the images are missing.
    """
    if data == "digits":
        dataset = load_digits()
    else:
        dataset = (load_mnist if data == "mnist" else load_cifar10)(folder)
    used = len(dataset.train_y) if everything else PUBLISHED_IMAGES
    train, test = (
        (jnp.asarray(x.reshape(len(x), -1)), jnp.asarray(y))
        for x, y in (
            (dataset.train_x[:used], dataset.train_y[:used]),
            (dataset.test_x, dataset.test_y),
        )
    )
    shapes = tuple(shapes_of((train[0].shape[1], *widths, len(dataset.classes))))
    return Problem(train, test, shapes, letter_mask(shapes[MIDDLE]))


def start(
    problem: Problem, manifold: Manifold | None, rounds: int, seed: int, masked: bool = True
) -> Weights:
    """Return random weights with all singular values `sqrt(fan_out / fan_in)`, the middle masked.

    Masking moves the matrix off the manifold. A round masks it and projects it to the nearest
    point, which writes into the letter; every further round leaves less in the letter.
    """
    templates = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in problem.shapes]
    weights = list(init_tree(Stiefel(FanRatio()), jax.random.key(seed), templates))
    mask = jnp.asarray(problem.mask) if masked else jnp.ones(problem.mask.shape)
    weights[MIDDLE] = weights[MIDDLE] * mask
    if manifold is not None:
        weights[MIDDLE] = _onto(manifold, rounds)(weights[MIDDLE], mask)
    return weights


def curves(name: str, problem: Problem, protocol: Protocol, masked: bool = True) -> dict[str, Any]:
    """Train with a method and measure at logarithmically spaced steps.

    Returns:
      `step`, the measured steps, and lists of the same length: `train_accuracy`,
      `test_accuracy`, `auc`, `ratio`, `update_rank` (the stable rank of the last update of the
      middle matrix) and `distance` (from the middle matrix to its manifold, None without a
      manifold).
    """
    method = method_of(name, problem.shapes)
    weights = start(problem, method.start, protocol.rounds, protocol.seed, masked)
    state: Any = method.update.transformation(1.0).init(weights)
    carry = (weights, state, jnp.zeros_like(weights[MIDDLE]))
    advance = _compiled(method.update, protocol.batch)
    key = jax.random.fold_in(jax.random.key(protocol.seed), 1)
    rows = [_measure(carry, problem, method.constraint)]
    steps = [0, *moments(protocol.steps)]
    for begin, end in itertools.pairwise(steps):
        carry = advance(carry, jnp.float32(protocol.rate), key, problem.train, begin, end)
        rows.append(_measure(carry, problem, method.constraint))
    return {"step": steps} | {what: [row[what] for row in rows] for what in rows[0]}


def moments(steps: int) -> list[int]:
    """Return the measured steps: 1, 3, 10, 30, ... and the last."""
    grid = (factor * 10**power for power in range(len(str(steps))) for factor in (1, 3))
    return [*(step for step in grid if step < steps), steps]


def half_life(steps: Sequence[int], auc: Sequence[float | None]) -> float | None:
    """Return the step at which the AUC has fallen to 0.75, interpolated on a logarithmic scale;
    None if it never falls that far, or if weights are not finite."""
    if any(value is None for value in auc):
        return None
    values = [float(value) for value in auc if value is not None]
    below = next((i for i, value in enumerate(values) if value <= HALF), None)
    if not below:
        return None if below is None else 0.0
    share = (values[below - 1] - HALF) / (values[below - 1] - values[below])
    before, after = (math.log1p(steps[i]) for i in (below - 1, below))
    return math.expm1(before + share * (after - before))


def ranks(problem: Problem, batch: int, seed: int) -> dict[str, float]:
    """Return stable ranks of the middle matrix's first gradient: as is, dualized by the published
    six steps, and dualized exactly."""
    weights = start(problem, None, 1, seed)
    key = jax.random.fold_in(jax.random.key(seed), 1)
    grad = jax.jit(_grad, static_argnums=3)(weights, key, problem.train, batch)[MIDDLE]
    made = {"gradient": grad, "six_steps": msign(grad, SIX_STEPS), "exact": msign(grad)}
    return {name: float(stable_rank(x)) for name, x in made.items()}


def loss(weights: Weights, images: Float[Array, "n pixels"], labels: Int[Array, " n"]):
    """Compute the mean squared error between outputs and one-hot labels."""
    outputs = logits(weights, images, 1.0)
    return jnp.mean((outputs - jax.nn.one_hot(labels, outputs.shape[-1])) ** 2)


def _grad(weights: Weights, key: Array, train: Part, batch: int) -> Weights:
    images, labels = train
    chosen = jax.random.choice(key, len(labels), (batch,))
    return jax.grad(loss)(weights, images[chosen], labels[chosen])


@functools.lru_cache(maxsize=2)
def _compiled(update: Update, batch: int) -> Any:
    """Compile the steps once for all rates, seeds and lengths, and for methods that differ only
    in their start."""

    @jax.jit
    def advance(carry, rate, key, train, begin, end):
        tx = update.transformation(rate)

        def step(k, carry):
            weights, state, _ = carry
            grads = _grad(weights, jax.random.fold_in(key, k), train, batch)
            updates: Any
            updates, state = tx.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state, updates[MIDDLE]

        return jax.lax.fori_loop(begin, end, step, carry)

    return advance


@functools.lru_cache(maxsize=2)
def _onto(manifold: Manifold, rounds: int) -> Any:
    def project(point, mask):
        return jax.lax.fori_loop(0, rounds, lambda _, w: manifold.project(w * mask), point)

    return jax.jit(project)


_accuracy = jax.jit(accuracy)
_stable_rank = jax.jit(stable_rank)


def _measure(carry: Any, problem: Problem, constraint: Manifold | None) -> dict[str, float | None]:
    weights, _, update = carry
    middle = np.asarray(weights[MIDDLE])
    finite = bool(np.isfinite(middle).all())
    return {
        "train_accuracy": float(_accuracy(weights, *problem.train)),
        "test_accuracy": float(_accuracy(weights, *problem.test)),
        "auc": erasure_auc(middle, problem.mask) if finite else None,
        "ratio": erasure_ratio(middle, problem.mask) if finite else None,
        "update_rank": float(_stable_rank(update)),
        "distance": None if constraint is None else float(constraint.distance(weights[MIDDLE])),
    }
