"""Attention as a bond, in one piece and in its pieces; rotary positions; and the GPT."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon.modules._algebra import Bond, Identity, Module
from manifoldmuon.modules._atoms import Embed, Linear
from manifoldmuon.modules._bonds import GELU, LayerNorm, MergeHeads, Positions, SplitHeads


@dataclasses.dataclass(frozen=True)
class FunctionalAttention(Bond):
    """`(q, k, v) -> softmax(q k^T / d + mask) v`, on `(..., sequence, d)` each.

    With the scale 1/d (not 1/sqrt(d)), in the largest RMS norm of a token, for inputs of norm at
    most 1 each: sensitivity 1 and sharpness 3 (modular norm, arXiv:2405.14813, proposition 7).

    Attributes:
      causal: whether a token sees only itself and those before it.
    """

    causal: bool = True
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 3.0

    def forward(
        self,
        x: tuple[
            Float[Array, "*batch t d"], Float[Array, "*batch t d"], Float[Array, "*batch t e"]
        ],
    ) -> Float[Array, "*batch t e"]:
        query, key, value = x
        scores = QueryKey().forward((query, key))
        if self.causal:
            scores = CausalMask().forward(scores)
        return AttendValues().forward((jax.nn.softmax(scores, axis=-1), value))


@dataclasses.dataclass(frozen=True)
class QueryKey(Bond):
    """`(q, k) -> q k^T / d`: the scores `(..., sequence, sequence)` of attention.

    In the largest RMS norm of a token and the largest score: sensitivity and sharpness 1, for
    queries and keys of norm at most 1. The sensitivity grows in proportion to their norm.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t d"], Float[Array, "*batch s d"]]
    ) -> Float[Array, "*batch t s"]:
        query, key = x
        return jnp.matmul(query, key.mT) / query.shape[-1]


@dataclasses.dataclass(frozen=True)
class CausalMask(Bond):
    """Scores `(..., sequence, sequence)` with minus infinity where a token would look ahead."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch t t"]) -> Float[Array, "*batch t t"]:
        return jnp.where(np.tri(x.shape[-1], dtype=bool), x, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class AttendValues(Bond):
    """`(probabilities, v) -> probabilities v`.

    In the largest sum of a row of probabilities and the largest RMS norm of a token: sensitivity
    and sharpness 1, for values of norm at most 1.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 1.0

    def forward(
        self, x: tuple[Float[Array, "*batch t s"], Float[Array, "*batch s e"]]
    ) -> Float[Array, "*batch t e"]:
        probabilities, value = x
        return jnp.matmul(probabilities, value)


@dataclasses.dataclass(frozen=True)
class RoPE(Bond):
    """Rotary positions on `(..., sequence, d)`: products of tokens depend on their distance.

    Entry j and entry j + d/2 of token t turn by the angle `t / base**(2 j / d)` in their plane: an
    isometry (Su et al., arXiv:2104.09864, with the halves for pairs).

    Attributes:
      base: the slowest rotation takes about `2 pi base` tokens.
    """

    base: float = 10_000.0
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, base="[1, inf)")

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch t d"]:
        tokens, dim = x.shape[-2:]
        if dim % 2:
            raise ValueError(f"RoPE turns pairs of entries; got {dim}, an odd number")
        half = dim // 2
        # In float64, at trace time: float32 loses the angles of late tokens.
        angles = np.outer(np.arange(tokens), self.base ** (-np.arange(half) / half))
        cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def Attention(
    width: int,
    heads: int,
    key_dim: int | None = None,
    value_dim: int | None = None,
    *,
    causal: bool = True,
    rope: bool = False,
) -> Module:
    """Multi-head attention on `(..., sequence, width)`: mass 4, sensitivity 1.

    `Linear @ MergeHeads @ 1/3 FunctionalAttention @ (Q, K, V)`: the third makes up for the three
    inputs, whose sensitivities add up (modular norm, arXiv:2405.14813, appendix B.6).

    Args:
      width: entries of a token.
      heads: how many.
      key_dim: entries of a query and a key of one head; None: `width // heads`.
      value_dim: entries of a value of one head; None: `width // heads`.
      causal: whether a token sees only itself and those before it.
      rope: whether queries and keys are rotated by their position.
    """
    check_number("Attention heads", heads, least=1.0, whole=True)
    key_dim = width // heads if key_dim is None else key_dim
    value_dim = width // heads if value_dim is None else value_dim
    turn = RoPE() if rope else Identity()
    query = turn @ SplitHeads(heads) @ Linear(heads * key_dim, width)
    key = turn @ SplitHeads(heads) @ Linear(heads * key_dim, width)
    value = SplitHeads(heads) @ Linear(heads * value_dim, width)
    attend = FunctionalAttention(causal) / 3
    return Linear(width, heads * value_dim) @ MergeHeads() @ attend @ (query, key, value)


def GPT(
    vocabulary: int,
    width: int,
    heads: int,
    blocks: int,
    *,
    context: int | None = None,
    mass: float = 5.0,
    layer_norm: bool = False,
) -> Module:
    """A language model on tokens `(..., sequence)`: scores `(..., sequence, vocabulary)`.

    Embedding and head have mass 1 each, sensitivity is 1. With the defaults this is the
    character GPT of the Modula package (rotary positions, no layer norms); with `context` and
    `layer_norm` the GPT of the modular norm (arXiv:2405.14813, appendix B.7).

    Args:
      vocabulary: how many tokens.
      width: entries of the residual stream.
      heads: attention heads; the width is divided among them.
      blocks: how many pairs of an attention block and an MLP block.
      context: None for rotary positions; else how many learned ones, a limit on the sequence
        (beyond it the output is NaN).
      mass: of all blocks together.
      layer_norm: whether each block and the head normalise what they read.
    """
    check_number("GPT blocks", blocks, least=1.0, whole=True)
    norm = LayerNorm() if layer_norm else Identity()
    attention = Attention(width, heads, rope=context is None) @ norm
    nonlinear = GELU(GELU.LIPSCHITZ) / GELU.LIPSCHITZ
    feed_forward = Linear(width, 4 * width) @ nonlinear @ Linear(4 * width, width) @ norm
    part = 1 / (2 * blocks)
    attention_block = (1 - part) * Identity() + part * attention
    feed_forward_block = (1 - part) * Identity() + part * feed_forward
    body = ((feed_forward_block @ attention_block) ** blocks).tare(absolute=mass)
    return Linear(vocabulary, width) @ norm @ body @ _embedding(width, vocabulary, context)


def _embedding(width: int, vocabulary: int, context: int | None) -> Module:
    tokens = Embed(width, vocabulary)
    if context is None:
        return tokens
    positions = Embed(width, context) @ Positions()
    return (0.5 * tokens + 0.5 * positions).tare()
