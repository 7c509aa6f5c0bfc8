"""The network of the constrained run: a GPT whose sharpness does not rest on growing weights."""

from manifoldmuon.modules import (
    GELU,
    Embed,
    FunctionalAttention,
    Identity,
    Linear,
    MergeHeads,
    Module,
    RMSDivide,
    RoPE,
    SplitHeads,
)


def bounded_gpt(
    vocabulary: int,
    width: int,
    heads: int,
    blocks: int,
    *,
    attention_scale: float,
    final_scale: float,
    part: float,
) -> Module:
    """A GPT with rotary positions, of the size of `modules.gpt`, for weights of norm 1.

    In `modules.gpt` the matrices become four (head) to twenty (queries and keys) times as large as
    they start, and that is how attention and predictions become sharp, and the blocks count beside
    the residual stream. With weights that keep their norm, fixed numbers say how far that may go:
    the root mean square of the logits is at most `final_scale`, scores of attention are of the
    size of `attention_scale` at most, and a block is `part` of its output. Every block reads a
    stream of unit size.

    Args:
      vocabulary: how many tokens.
      width: entries of the residual stream.
      heads: of attention.
      blocks: pairs of an attention block and an MLP block.
      attention_scale: factor of the scores.
      final_scale: factor of the logits.
      part: the share of a block in its output; the rest is its input.
    """
    turn = RoPE() @ SplitHeads(heads)
    query = attention_scale * (turn @ Linear(width, width))
    key = turn @ Linear(width, width)
    value = SplitHeads(heads) @ Linear(width, width)
    attention = Linear(width, width) @ MergeHeads() @ FunctionalAttention() @ (query, key, value)
    feed_forward = Linear(width, 4 * width) @ GELU() @ Linear(4 * width, width)
    attention_block, feed_forward_block = (
        (1 - part) * Identity() + part * (function @ RMSDivide())
        for function in (attention, feed_forward)
    )
    body = (feed_forward_block @ attention_block) ** blocks
    head = final_scale * Linear(vocabulary, width) @ RMSDivide()
    return head @ body @ Embed(width, vocabulary)
