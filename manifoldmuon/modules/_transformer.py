"""Published architectures with attention: Attention and GPT."""

from manifoldmuon.modules._algebra import Identity, Module
from manifoldmuon.modules._attention import FunctionalAttention, RoPE
from manifoldmuon.modules._embed import Embed
from manifoldmuon.modules._leaf import check_number
from manifoldmuon.modules._linear import Linear
from manifoldmuon.modules._normalization import LayerNorm
from manifoldmuon.modules._pointwise import GELU
from manifoldmuon.modules._reshaping import MergeHeads, Positions, SplitHeads


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
    check_number("Attention heads", heads, least=1.0)
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
    check_number("GPT blocks", blocks, least=1.0)
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
