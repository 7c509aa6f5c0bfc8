"""A ReLU network without biases: a list of (fan_out, fan_in) matrices."""

import itertools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import init_tree

# Not named axes: they would have to be the same numbers in every layer.
Weights = list[Float[Array, "_ _"]]


def shapes_of(widths: tuple[int, ...]) -> list[tuple[int, int]]:
    """The shapes of the weights between layers of these widths."""
    return [(after, before) for before, after in itertools.pairwise(widths)]


def init_weights(seed: int | Int[Array, ""], shapes: list[tuple[int, int]]) -> Weights:
    """Random matrices whose singular values are all 1: every optimizer starts from these."""
    templates = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return init_tree(Stiefel(), jax.random.key(seed), templates)


def logits(
    weights: Weights, images: Float[Array, "batch pixels"], multiplier: float
) -> Float[Array, "batch classes"]:
    """The network's output.

    A Lipschitz constant bounds the differences of logits, and with them the confidence that
    cross-entropy asks for. The multiplier says how large it may be: it is the Lipschitz bound
    of a network whose matrices all have spectral norm 1.
    """
    *hidden, last = weights
    for weight in hidden:
        images = jax.nn.relu(images @ weight.T)
    return multiplier * (images @ last.T)


def cross_entropy(
    weights: Weights,
    images: Float[Array, "batch pixels"],
    labels: Int[Array, " batch"],
    multiplier: float,
) -> Float[Array, ""]:
    """The mean over the batch, in nats."""
    outputs = logits(weights, images, multiplier)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def accuracy(
    weights: Weights, images: Float[Array, "batch pixels"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    """The share of images whose largest logit is that of the label."""
    return jnp.mean(jnp.argmax(logits(weights, images, 1.0), axis=-1) == labels)
