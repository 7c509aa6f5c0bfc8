"""Text from a trained network, one character at a time."""

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
    """Continues a prompt.

    Each new token is drawn from `softmax(scores / temperature)` given at most `context` tokens
    before it; the window slides, which rotary positions allow.

    Args:
      network: a language model.
      weights: its weights.
      key: of the draws.
      prompt: one token or more; the last `context` of them count.
      context: how many tokens the network reads.
      length: how many tokens to draw.
      temperature: below 1 for likelier characters; may be traced.
    """
    prompt = prompt[-context:]
    # The window is filled from the left; a causal network does not see what lies behind.
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
