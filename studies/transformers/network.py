"""A small standard language model: pre-norm, rotary positions, query-key norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

HEAD = 32
"""Entries of a head."""

ROLES = ("q", "k", "v", "o", "up", "down")
BRANCH_ENDS = ("o", "down")
"""The last matrices of the branches: their outputs are added to the residual stream."""


class Size(NamedTuple):
    """A network.

    Attributes:
      width: entries of the residual stream, a multiple of `HEAD`.
      blocks: pairs of an attention branch and an MLP branch.
      vocabulary: the number of tokens.
    """

    width: int
    blocks: int
    vocabulary: int

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the shape `(blocks, fan_out, fan_in)` of the stacked matrices of each role."""
        d, n = self.width, self.blocks
        square = dict.fromkeys(ROLES[:4], (n, d, d))
        return {**square, "up": (n, 4 * d, d), "down": (n, d, 4 * d)}

    def start(self, key: PRNGKeyArray) -> dict[str, Any]:
        """Return initial weights: Gaussian matrices of variance 1 / fan-in, a standard Gaussian
        embedding, a head of zeros, gains of 1.

        The factor `1 / sqrt(blocks)` of the branch ends (`branch_scale`) is not included.
        """
        embedding, *keys = jax.random.split(key, 1 + len(ROLES))
        shapes = self.shapes()
        table = (self.vocabulary, self.width)
        return {
            "embedding": jax.random.normal(embedding, table),
            "head": jnp.zeros(table),
            "matrices": {
                role: jax.random.normal(key, shapes[role]) / np.sqrt(shapes[role][-1])
                for role, key in zip(ROLES, keys, strict=True)
            },
            "gains": {role: jnp.ones(self.blocks) for role in ROLES},
        }

    def branch_scale(self) -> float:
        """Return the factor of the branch ends, which keeps the residual stream of a deep network
        from growing."""
        return self.blocks**-0.5


class Activations(NamedTuple):
    """Statistics of a forward pass, by block.

    Attributes:
      kurtosis: the kurtosis of the residual stream after each block:
        `mean(x**4) / mean(x**2)**2` over the entries, averaged over tokens.
      hidden: hidden activations of the MLP, `(blocks, tokens, 4 * width)`.
    """

    kurtosis: Float[Array, " blocks"]
    hidden: Float[Array, "blocks tokens h"]


def scores_of(
    weights: dict[str, Any], tokens: Int[Array, "batch time"]
) -> tuple[Float[Array, "batch time v"], Activations]:
    """Return the scores of the next token, and the activations."""
    matrices = {
        role: weights["gains"][role][:, None, None] * weights["matrices"][role] for role in ROLES
    }
    batch, time = tokens.shape
    x = _normalised(weights["embedding"][tokens])
    cosine, sine = _rotations(time)
    mask = jnp.where(np.tril(np.ones((time, time), bool)), 0.0, -1e9)
    kurtosis, hidden = [], []
    for block in range(len(matrices["q"])):
        own = {role: stack[block] for role, stack in matrices.items()}
        qkv = _normalised(x) @ jnp.concatenate([own["q"], own["k"], own["v"]]).T
        qkv = qkv.reshape(batch, time, 3, -1, HEAD)
        q, k = (_rotate(_normalised(qkv[:, :, i]), cosine, sine) for i in (0, 1))
        attention = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(HEAD) + mask
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(attention), qkv[:, :, 2])
        x = x + mixed.reshape(x.shape) @ own["o"].T
        active = jax.nn.relu(_normalised(x) @ own["up"].T) ** 2
        x = x + active @ own["down"].T
        kurtosis.append(jnp.mean(jnp.mean(x**4, -1) / jnp.mean(x**2, -1) ** 2))
        hidden.append(active.reshape(batch * time, -1))
    scores = _normalised(x) @ weights["head"].T
    return scores, Activations(jnp.stack(kurtosis), jnp.stack(hidden))


def loss_of(weights: dict[str, Any], inputs: Any, targets: Any) -> Float[Array, ""]:
    """Return the mean cross-entropy, in nats."""
    scores, _ = scores_of(weights, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def _normalised(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _rotations(time: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(time)[:, None] * 1e4 ** (-np.arange(0, HEAD, 2) / HEAD)
    return np.cos(angles)[:, None].astype("f4"), np.sin(angles)[:, None].astype("f4")


def _rotate(x: Array, cosine: np.ndarray, sine: np.ndarray) -> Array:
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cosine - two * sine, one * sine + two * cosine], axis=-1)
