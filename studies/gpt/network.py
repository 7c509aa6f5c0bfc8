"""Network of the constrained run: a GPT that becomes sharp without growing its weights."""

from manifoldmuon import modules


def bounded_gpt(
    vocabulary: int,
    width: int,
    heads: int,
    blocks: int,
    *,
    attention_scale: float,
    final_scale: float,
    part: float,
) -> modules.Module:
    """Return a GPT with rotary positions, of the size of `modules.gpt`, for weights of norm 1.

    In `modules.gpt` the matrices grow to four (head) to twenty (queries and keys) times their
    initial size. This growth sharpens attention and predictions, and gives the blocks weight
    relative to the residual stream. Weights of fixed norm need fixed factors instead: the root mean
    square of the logits is at most `final_scale`, attention scores are at most of the order of
    `attention_scale`, and a block contributes the share `part` of its output. Every block reads a
    stream of unit size.

    Args:
      vocabulary: number of tokens.
      width: width of the residual stream.
      heads: number of attention heads.
      blocks: number of pairs of an attention block and an MLP block.
      attention_scale: factor of the scores.
      final_scale: factor of the logits.
      part: share of a block in its output; the rest is its input.
    """
    turn = modules.RoPE() @ modules.SplitHeads(heads)
    query = attention_scale * (turn @ modules.Linear(width, width))
    key = turn @ modules.Linear(width, width)
    value = modules.SplitHeads(heads) @ modules.Linear(width, width)
    attention = (
        modules.Linear(width, width)
        @ modules.MergeHeads()
        @ modules.FunctionalAttention()
        @ (query, key, value)
    )
    feed_forward = (
        modules.Linear(width, 4 * width) @ modules.GELU() @ modules.Linear(4 * width, width)
    )
    attention_block, feed_forward_block = (
        (1 - part) * modules.Identity() + part * (function @ modules.RMSDivide())
        for function in (attention, feed_forward)
    )
    body = (feed_forward_block @ attention_block) ** blocks
    head = final_scale * modules.Linear(vocabulary, width) @ modules.RMSDivide()
    return head @ body @ modules.Embed(width, vocabulary)
