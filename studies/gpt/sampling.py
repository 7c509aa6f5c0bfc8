"""Text generation with a trained network, a character at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from manifoldmuon.modules import Module


@functools.partial(jax.jit, static_argnames=("network", "context", "length"))
def sample(
    network: Module,
    weights: Any,
    key: PRNGKeyArray,
    prompt: Int[Array, " given"],
    context: int,
    length: int,
    temperature: float | Array = 1.0,
) -> Int[Array, " length"]:
    """Continue a prompt.

    Draws each new token from `softmax(scores / temperature)`, given at most `context` previous
    tokens; the window slides, which rotary positions allow.

    Args:
      network: language model.
      weights: its weights.
      key: random key.
      prompt: at least one token; only the last `context` tokens are used.
      context: number of tokens that the network reads.
      length: number of tokens to draw.
      temperature: lower values prefer likelier characters; may be traced.
    """
    prompt = prompt[-context:]
    # Fill the window from the left: a causal network ignores positions after the current token.
    window = jnp.zeros(context, jnp.int32).at[: len(prompt)].set(prompt)

    def draw(carry, key):
        window, filled = carry
        scores = network.apply(weights, window)[filled - 1]
        token = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
        full = filled == context
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, context - 1, filled)].set(token)
        return (window, jnp.minimum(filled + 1, context)), token

    _, tokens = jax.lax.scan(draw, (window, jnp.int32(len(prompt))), jax.random.split(key, length))
    return tokens
