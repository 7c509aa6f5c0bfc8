"""Training for `agd`: square loss, scaled inputs and targets, a scan for each epoch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import manifoldmuon as mm
from studies.classification import Weights, accuracy, logits, shapes_of
from studies.datasets import FlatImages, batches

LAYOUT = mm.manifolds.Layout()


@dataclasses.dataclass(frozen=True)
class AGDSettings:
    """The options of `studies.step_lengths.agd`.

    Attributes:
      data: the data set: "digits", "mnist" or "cifar10".
      width: the width of the hidden layers.
      depths: the numbers of linear layers of the networks.
      epochs: passes over the training images.
      batch_size: images per update.
      learning_rates: constant learning rates of Adam, with a run for each.
      gain: the gain of automatic gradient descent; 1 as published.
      seed: seeds the split, the initial weights and the order of the images.
    """

    data: str = "digits"
    width: int = 64
    depths: tuple[int, ...] = (2, 4, 8, 16)
    epochs: int = 400
    batch_size: int = 128
    learning_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    gain: float = 1.0
    seed: int = 0

    def steps_per_epoch(self, images: int) -> int:
        """Return the number of full batches in so many images."""
        return images // self.batch_size


@dataclasses.dataclass(frozen=True)
class AGDRun:
    """Results of a training; curves are measured after 0, 1, ... epochs.

    Attributes:
      depth: the number of linear layers.
      method: "agd", or "adam" with its learning rate.
      train_loss: the loss on all training images.
      train_accuracy: the accuracy on all training images.
      test_accuracy: the accuracy on all test images.
      eta: the mean automatic step length in every epoch; empty for Adam.
    """

    depth: int
    method: str
    train_loss: list[float]
    train_accuracy: list[float]
    test_accuracy: list[float]
    eta: list[float]


def methods(settings: AGDSettings) -> dict[str, optax.GradientTransformation]:
    """Return automatic gradient descent, and Adam for each learning rate."""
    adams: dict[str, optax.GradientTransformation] = {
        f"adam {rate:g}": optax.adam(rate) for rate in settings.learning_rates
    }
    return {"agd": mm.optim.agd(LAYOUT, settings.gain)} | adams


def scale_images(data: FlatImages) -> FlatImages:
    """Scale every image to the sphere of radius `sqrt(pixels)`, as the method requires."""

    def unit(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        rms = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        return x / np.where(rms == 0, 1, rms)

    return data._replace(train_x=unit(data.train_x), test_x=unit(data.test_x))


def square_loss(
    weights: Weights, images: Float[Array, "n d"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """Compute the batch mean of `|f - y|^2 / (2 classes)`; `y` is one-hot times `sqrt(classes)`."""
    outputs = logits(weights, images, 1.0)
    classes = outputs.shape[-1]
    targets = jax.nn.one_hot(labels, classes) * classes**0.5
    return jnp.mean((outputs - targets) ** 2) / 2


def train(
    settings: AGDSettings,
    depth: int,
    method: str,
    data: FlatImages,
    report: Callable[[float, float], None],
) -> AGDRun:
    """Train a network with a method.

    Args:
      settings: the settings of the run.
      depth: the number of linear layers.
      method: a key of `methods`.
      data: scaled images.
      report: called after every epoch with the training loss and the test accuracy.
    """
    tx = methods(settings)[method]
    shapes = shapes_of(data.widths((settings.width,) * (depth - 1)))
    templates = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    key = jax.random.key(settings.seed)
    weights = mm.optim.init_semi_orthogonal(LAYOUT, key, templates)
    arrays = tuple(jnp.asarray(part) for part in data[:4])
    epoch, evaluate = jax.jit(_epoch(tx)), jax.jit(_evaluate)
    steps = settings.steps_per_epoch(len(data.train_y))
    total = steps * settings.epochs
    order = batches(settings.seed, len(data.train_y), total, settings.batch_size)
    run = AGDRun(depth, method, [], [], [], [])
    state = tx.init(weights)
    for index in range(settings.epochs + 1):
        if index:
            rows = jnp.asarray(order[(index - 1) * steps : index * steps])
            weights, state, eta = epoch(weights, state, *arrays[:2], rows)
            if eta is not None:
                run.eta.append(float(eta))
        found = [float(x) for x in evaluate(weights, *arrays)]
        for curve, x in zip((run.train_loss, run.train_accuracy, run.test_accuracy), found,
                            strict=True):  # fmt: skip
            curve.append(x)
        if index:
            report(run.train_loss[-1], run.test_accuracy[-1])
    return run


def _epoch(tx: optax.GradientTransformation) -> Callable[..., Any]:
    def epoch(weights, state, images, labels, rows):
        def step(carry, batch):
            weights, state = carry
            grads = jax.grad(square_loss)(weights, images[batch], labels[batch])
            updates, state = tx.update(grads, state, weights)
            return (optax.apply_updates(weights, updates), state), _eta(state)

        (weights, state), etas = jax.lax.scan(step, (weights, state), rows)
        return weights, state, None if etas is None else jnp.mean(etas)

    return epoch


def _eta(state: Any) -> Float[Array, ""] | None:
    return getattr(state[0], "eta", None)  # None for Adam


def _evaluate(weights, train_x, train_y, test_x, test_y):
    loss = square_loss(weights, train_x, train_y)
    hits = functools.partial(accuracy, weights)
    return loss, hits(train_x, train_y), hits(test_x, test_y)
