"""Training for `free_steps`: one network, one way to choose the length of the steps."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import manifoldmuon as mm
from manifoldmuon import contrib
from manifoldmuon.contrib import DeepTrust, SquareLossSmoothness, StepRule
from manifoldmuon.modules import Module, mlp, res_mlp
from studies.datasets import FlatImages, batches, load_digits, standardise
from studies.step_lengths.agd_training import scale_images

NETWORKS: dict[str, Module] = {"mlp": mlp(10, 64, 128, 3), "resmlp": res_mlp(10, 64, 128, 3)}

RATES = tuple(2.0**power for power in range(-4, 1))
"""The grid of learning rates; they fall linearly to zero."""


class FreeRun(NamedTuple):
    """One seed of one method.

    Attributes:
      train_loss: of all training images, after the last step.
      test_accuracy: likewise, of the test images.
      learning_rate: of every step.
    """

    train_loss: float
    test_accuracy: float
    learning_rate: Float[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True)
class Polyak(StepRule):
    """`loss / slope`: where the tangent line reaches zero. Shown, and not kept: see the docs."""

    def length(self, slope: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
        return value / jnp.where(slope == 0, jnp.inf, slope)


def free_links(net: Module) -> dict[str, optax.GradientTransformation]:
    """Links in place of `optax.scale_by_learning_rate`, without a learning rate."""
    geometry, budgets = net.geometry(), net.budgets()
    return {
        "smoothness": contrib.scale_by_rule(SquareLossSmoothness(net.sharpness.alpha)),
        "deep trust": contrib.scale_by_rule(DeepTrust()),
        "line search": contrib.scale_by_line_search(geometry),
        "distance": contrib.scale_by_distance(geometry, budgets),
        "Polyak": contrib.scale_by_rule(Polyak()),
    }


def tuned_links(steps: int) -> dict[str, optax.GradientTransformation]:
    """Modular descent with each learning rate of the grid."""
    return {
        f"rate {rate:g}": optax.scale_by_learning_rate(optax.linear_schedule(rate, 0.0, steps))
        for rate in RATES
    }


def digits(seed: int) -> FlatImages:
    """Handwritten digits with the split of this seed, every image of root mean square 1."""
    return scale_images(standardise(load_digits(seed)))


def trainer(
    net: Module, link: optax.GradientTransformation, momentum: float
) -> Callable[..., tuple[Any, Any]]:
    """A compiled function from weights, images, labels and batches to weights and step lengths."""
    geometry = net.geometry()
    tx = mm.optim.chain(
        optax.ema(momentum),
        mm.optim.scale_by_steepest(geometry),
        mm.optim.scale_by_budget(net.budgets()),
        link,
        mm.optim.retract(geometry),
    )

    def run(weights, images, labels, order):
        def step(carry, rows):
            weights, state = carry
            x, y = images[rows], labels[rows]

            def loss(w):
                return square_loss(net, w, x, y)

            value, grads = jax.value_and_grad(loss)(weights)
            updates, state = tx.update(
                grads, state, weights, value=value, grad=grads, value_fn=loss
            )
            links: Any = state
            rate = getattr(links[3], "learning_rate", jnp.nan)  # a schedule keeps none
            return (optax.apply_updates(weights, updates), state), rate

        (weights, _), rates = jax.lax.scan(step, (weights, tx.init(weights)), order)
        return weights, rates

    return jax.jit(run)


def square_loss(net: Module, weights: Any, images: Any, labels: Any) -> Float[Array, ""]:
    """`|f - y|_RMS^2 / 2`, batch mean; the one-hot targets have root mean square 1."""
    outputs = net.apply(weights, images)
    classes = outputs.shape[-1]
    return jnp.mean((outputs - jax.nn.one_hot(labels, classes) * classes**0.5) ** 2) / 2


def train_once(net: Module, run: Any, seed: int, steps: int, batch_size: int) -> FreeRun:
    """Trains from the initial weights of the seed, on its split and its batches."""
    data = digits(seed)
    order = jnp.asarray(batches(seed, len(data.train_y), steps, batch_size))
    train_x, train_y, test_x = map(jnp.asarray, data[:3])
    weights, rates = run(net.init(jax.random.key(seed)), train_x, train_y, order)
    loss = square_loss(net, weights, train_x, train_y)
    answers = np.argmax(np.asarray(net.apply(weights, test_x)), axis=-1)
    return FreeRun(float(loss), float(np.mean(answers == data.test_y)), np.asarray(rates))
