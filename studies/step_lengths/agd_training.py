"""Training for `agd`: square loss, scaled inputs and targets, one scan for each epoch."""

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
      width: of the hidden layers.
      depths: numbers of linear layers; one network for each.
      epochs: passes over the training images.
      batch_size: images per update.
      learning_rates: of Adam, constant; one run for each.
      gain: of automatic gradient descent; 1 as published.
      seed: of the split, the initial weights and the order of the images.
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
        """Whole batches in so many images."""
        return images // self.batch_size


@dataclasses.dataclass(frozen=True)
class AGDRun:
    """One network, trained once.

    Attributes:
      depth: linear layers.
      method: "agd", or "adam" with its learning rate.
      train_loss: of all training images, after 0, 1, ... epochs.
      train_accuracy: likewise.
      test_accuracy: likewise.
      eta: the mean automatic step length in every epoch; empty for Adam.
    """

    depth: int
    method: str
    train_loss: list[float]
    train_accuracy: list[float]
    test_accuracy: list[float]
    eta: list[float]


def methods(settings: AGDSettings) -> dict[str, optax.GradientTransformation]:
    """Automatic gradient descent, and Adam once for each learning rate."""
    adams: dict[str, optax.GradientTransformation] = {
        f"adam {rate:g}": optax.adam(rate) for rate in settings.learning_rates
    }
    return {"agd": mm.optim.agd(LAYOUT, settings.gain)} | adams


def scale_images(data: FlatImages) -> FlatImages:
    """Every image on the sphere of radius `sqrt(pixels)`, as the method asks for."""

    def unit(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        rms = np.sqrt(np.mean(x**2, axis=1, keepdims=True))
        return x / np.where(rms == 0, 1, rms)

    return data._replace(train_x=unit(data.train_x), test_x=unit(data.test_x))


def square_loss(
    weights: Weights, images: Float[Array, "n d"], labels: Int[Array, " n"]
) -> Float[Array, ""]:
    """`|f - y|^2 / (2 classes)`, batch mean; `y` is one-hot, of norm `sqrt(classes)`."""
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
    """Trains one network with one method.

    Args:
      settings: of the run.
      depth: linear layers.
      method: a name of `methods`.
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
    return getattr(state[0], "eta", None)  # of automatic gradient descent alone


def _evaluate(weights, train_x, train_y, test_x, test_y):
    loss = square_loss(weights, train_x, train_y)
    hits = functools.partial(accuracy, weights)
    return loss, hits(train_x, train_y), hits(test_x, test_y)
