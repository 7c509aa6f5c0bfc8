"""Weight erasure: the masked network, the two methods, and the measurements."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import manifoldmuon as mm
from manifoldmuon.lab import erasure_auc, letter_mask, stable_rank
from manifoldmuon.linalg import MsignMethod, power_iteration
from studies.datasets import Dataset
from studies.reproduction import modula

BATCH = 1024
SAMPLED = 3072
"""Number of images, as published: the sampler confuses it with the number of pixels."""

METHODS = ("dualized", "gradient")
MIDDLE = 2
"""Index of the middle matrix among the parameters."""


class Problem:
    """Network, masked initial weights and images (with values in [0, 1]).

    Attributes:
      network: 3072 - width - width - 10, with ReLUs.
      mask: mask of the middle matrix, zero on the letter.
      params: initial weights.
      train: flattened training images for the batches, and their classes.
      test: flattened test images, and their classes.
    """

    def __init__(self, dataset: Dataset, width: int, method: MsignMethod, sampled: int):
        def part(x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
            return jnp.asarray(x.reshape(len(x), -1)), jnp.asarray(y)

        self.train = part(dataset.train_x[:sampled], dataset.train_y[:sampled])
        self.test = part(dataset.test_x, dataset.test_y)
        self.classes = len(dataset.classes)
        self.network = modula.mlp(self.train[0].shape[1], width, self.classes, method)
        self.mask = letter_mask((width, width))
        self.params = _masked(
            modula.init(self.network, jax.random.key(0), method), jnp.asarray(self.mask)
        )
        self._accuracy = jax.jit(self.accuracy)

    def grad(self, params: Any, key: jax.Array, train: tuple[jax.Array, jax.Array]) -> Any:
        """Return the gradient of the mean square error, on a batch drawn with replacement."""
        images, labels = train
        batch = jax.random.choice(key, len(labels), (BATCH,))

        def loss(params):
            errors = self.network.apply(params, images[batch])
            return jnp.mean((errors - jax.nn.one_hot(labels[batch], self.classes)) ** 2)

        return jax.grad(loss)(params)

    def accuracy(self, params: Any, part: tuple[jax.Array, jax.Array]) -> Float[Array, ""]:
        """Return the share of images with the largest output at their class."""
        images, labels = part
        return jnp.mean(jnp.argmax(self.network.apply(params, images), axis=-1) == labels)

    def transformation(self, method: str, learning_rate: float) -> optax.GradientTransformation:
        """Return an optimizer with dualized gradients, or gradients of the same spectral norm."""
        if method == "dualized":
            return mm.optim.modular(learning_rate, self.network, momentum=None)
        return optax.chain(
            scale_by_spectral_norm(),
            mm.optim.scale_by_budget(self.network.budgets()),
            optax.scale_by_learning_rate(learning_rate),
        )

    def measure(self, params: Any, update: Any) -> dict[str, float | None]:
        """Return a row of the record; `update` is the middle matrix's last update, or None."""
        weight = np.asarray(params[MIDDLE])
        alive = bool(np.isfinite(weight).all())
        return {
            "train_accuracy": float(self._accuracy(params, self.train)),
            "test_accuracy": float(self._accuracy(params, self.test)),
            "auc": erasure_auc(weight, self.mask) if alive else None,
            "ratio": erasure_ratio(weight, self.mask) if alive else None,
            "stable_rank": None if update is None else float(stable_rank(update)),
        }


def erasure_ratio(weight: Float[np.ndarray, "..."], mask: Float[np.ndarray, "..."]) -> float:
    """Return the RMS of the weights inside the letter divided by the RMS outside.

    0 right after masking, about 1 when the letter is gone; NaN if the weights outside are 0.
    """
    squares = np.square(weight, dtype=np.float64)
    outside = float(np.mean(squares[mask != 0]))
    return float(np.sqrt(np.mean(squares[mask == 0]) / outside)) if outside else float("nan")


def _masked(params: Any, mask: Float[Array, "n n"]) -> Any:
    return (*params[:MIDDLE], params[MIDDLE] * mask, *params[MIDDLE + 1 :])


def scale_by_spectral_norm() -> optax.GradientTransformation:
    """Scale gradients to RMS-to-RMS norm 1, keeping their singular vectors.

    Uses warm-started power iteration; the gradients have rank close to 1, and a single step is
    exact at rank 1.
    """

    def init_fn(params: Any) -> list[jax.Array]:
        return [jnp.zeros(w.shape[-1]) for w in jax.tree.leaves(params)]

    def update_fn(updates: Any, state: Any, params: Any = None):
        del params
        leaves, tree = jax.tree.flatten(updates)
        found = [power_iteration(g, v, steps=4) for g, v in zip(leaves, state, strict=True)]
        scaled = [
            g * (math.sqrt(g.shape[0] / g.shape[1]) / jnp.where(sigma == 0, 1, sigma))
            for g, (sigma, _) in zip(leaves, found, strict=True)
        ]
        return jax.tree.unflatten(tree, scaled), [vector for _, vector in found]

    return optax.GradientTransformation(init_fn, update_fn)


def stable_ranks(dataset: Dataset, width: int, steps: int) -> list[dict[str, Any]]:
    """Return stable ranks of the middle matrix's update, before and after dualized training.

    Training takes `steps` dualized steps of learning rate 1/2. Each row has the gradient and the
    results of three iterations.
    """
    problem = Problem(dataset, width, modula.TEN_QUINTICS, SAMPLED)
    tx = problem.transformation("dualized", 0.5)
    iterations = {
        "ten quintics": modula.TEN_QUINTICS,
        "six steps": modula.SIX_STEPS,
        "converged": None,
    }

    @jax.jit
    def measure(params, key, train):
        grad = problem.grad(params, key, train)[MIDDLE]
        made = {name: mm.linalg.msign(grad, method) for name, method in iterations.items()}
        return {name: stable_rank(x) for name, x in ({"gradient": grad} | made).items()}

    @jax.jit
    def step(params, state, key, train):
        updates, state = tx.update(problem.grad(params, key, train), state, params)
        return optax.apply_updates(params, updates), state

    params, state, rows = problem.params, tx.init(problem.params), []
    for t in range(steps + 1):
        key = jax.random.fold_in(jax.random.key(1), t)
        if t in (0, steps):
            found = measure(params, key, problem.train)
            rows.append({"width": width, "steps": t} | jax.tree.map(float, found))
        params, state = step(params, state, key, problem.train)
    return rows
