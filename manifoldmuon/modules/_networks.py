"""Published architectures: MLP, residual networks, attention and GPT."""

from __future__ import annotations

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.modules import _attention, _bonds
from manifoldmuon.modules._atoms import Conv2D, Embed, Linear
from manifoldmuon.modules._module import Identity, Module


def mlp(
    outputs: int, inputs: int, width: int, depth: int, activation: Module = _bonds.ReLU()
) -> Module:
    """Return `depth` linear layers with activations between them.

    Args:
      outputs: entries of the output.
      inputs: entries of the input.
      width: entries of the hidden layers.
      depth: number of linear layers; at least 2. The middle layers form a `Stack`.
      activation: applied between two layers. The default declares sensitivity 1, so that every
        layer has the same budget.

    Examples:
      >>> mlp(10, 784, 256, depth=3).mass
      3.0
    """
    check_number("mlp(depth)", depth, within="[2, inf)", whole=True)
    body = (activation @ Linear(width, width)) ** (depth - 2) @ activation @ Linear(width, inputs)
    return Linear(outputs, width) @ body


def residual(residue: Module, blocks: int) -> Module:
    """Return `((1 - 1/L) Identity + 1/L residue) ** L`.

    The sensitivity is 1 if the residue's is, and the sharpness is bounded at every depth (modular
    norm, arXiv:2405.14813, proposition 4).

    Args:
      residue: a module with outputs of the shape and dtype of its inputs.
      blocks: L, the number of blocks.

    Examples:
      >>> round(residual(ReLU() @ Linear(8, 8), blocks=6).sensitivity, 6)
      1.0
    """
    check_number("residual(blocks)", blocks, within="[1, inf)", whole=True)
    return _residual(residue, 1 / blocks) ** blocks


def _residual(residue: Module, share: float) -> Module:
    return (1 - share) * Identity() + share * residue


def res_mlp(
    outputs: int, inputs: int, width: int, blocks: int, block_depth: int = 2, mass: float = 1.0
) -> Module:
    """Return the residual MLP of the modular norm (arXiv:2405.14813, appendix B.5).

    Each residue is `MeanSubtract @ Abs @ Linear @ RMSDivide`, `block_depth` times.

    Args:
      outputs: entries of the output.
      inputs: entries of the input.
      width: entries of the residual stream.
      blocks: number of residual blocks.
      block_depth: layers per block.
      mass: total mass of the blocks; the first and last layers have mass 1 each.

    Examples:
      >>> res_mlp(10, 784, 128, blocks=4).mass
      3.0
    """
    body = _residual_body(Linear(width, width), blocks, block_depth, mass)
    return Linear(outputs, width) @ body @ Linear(width, inputs)


def _residual_body(atom: Module, blocks: int, block_depth: int, mass: float) -> Module:
    layer = _bonds.MeanSubtract() @ _bonds.Abs() @ atom @ _bonds.RMSDivide()
    return residual(layer**block_depth, blocks).tare(absolute=mass)


def res_cnn(
    outputs: int,
    channels: int,
    width: int,
    blocks: int,
    block_depth: int = 2,
    mass: float = 20.0,
    kernel: int = 3,
    pool: int = 1,
) -> Module:
    """Return the residual convolutional network of the modular norm, for images, channels last.

    It is `res_mlp` (appendix B.5 of the paper) with convolutions, then average pooling, flattening
    and a linear head. Means and root mean squares are taken over the channels of each pixel.

    Args:
      outputs: entries of the output.
      channels: channels of the input.
      width: channels of the residual stream.
      blocks: number of residual blocks.
      block_depth: layers per block.
      mass: total mass of the blocks; the first and last layers have mass 1 each.
      kernel: taps along each side of a convolution.
      pool: pixels along each side of the pooled image.

    Examples:
      >>> res_cnn(10, 3, 32, blocks=2).mass
      22.0
    """
    body = _residual_body(Conv2D(width, width, kernel), blocks, block_depth, mass)
    head = Linear(outputs, pool * pool * width) @ _bonds.Flatten(3) @ _bonds.AveragePool(pool, pool)
    return head @ body @ Conv2D(width, channels, kernel)


def attention(width: int, heads: int, *, causal: bool = True, rope: bool = False) -> Module:
    """Return multi-head attention on `(..., sequence, width)`: mass 4, sensitivity 1.

    `Linear @ MergeHeads @ 1/3 FunctionalAttention @ (Q, K, V)`: the factor 1/3 compensates for
    three inputs, as sensitivities add up (modular norm, arXiv:2405.14813, appendix B.6).

    Args:
      width: entries of a token.
      heads: number of heads, of `width // heads` entries each.
      causal: whether a token sees only itself and earlier tokens.
      rope: whether to use rotary positions (`RoPE`) for queries and keys.

    Examples:
      >>> attention(128, heads=4).mass
      4.0
    """
    check_number("attention(heads)", heads, within="[1, inf)", whole=True)
    inner = width // heads * heads
    value = _attention.SplitHeads(heads) @ Linear(inner, width)
    query = _attention.RoPE() @ value if rope else value
    attend = _attention.FunctionalAttention(causal) / 3
    return Linear(width, inner) @ _attention.MergeHeads() @ attend @ (query, query, value)


def gpt(
    vocabulary: int,
    width: int,
    heads: int,
    blocks: int,
    *,
    context: int | None = None,
    mass: float = 5.0,
    layer_norm: bool = False,
) -> Module:
    """Return a language model on tokens `(..., sequence)`: scores `(..., sequence, vocabulary)`.

    The sensitivity is 1. The defaults give the character GPT of the Modula package (rotary
    positions, no layer norms), with the exact GELU; Modula's `Rope` swaps the halves of a head,
    which does not change the scores. With `context` and `layer_norm` it is the GPT of the modular
    norm (arXiv:2405.14813, appendix B.7).

    Args:
      vocabulary: number of tokens.
      width: entries of the residual stream.
      heads: attention heads; the width is divided among them.
      blocks: number of pairs of an attention block and an MLP block.
      context: None for rotary positions; else the number of learned positions, which limits the
        sequence length (a longer sequence gives NaN).
      mass: total mass of the blocks; embedding and head have mass 1 each.
      layer_norm: whether each block and the head normalise their inputs.

    Examples:
      >>> gpt(65, width=128, heads=4, blocks=4).mass
      7.0
    """
    check_number("gpt(blocks)", blocks, within="[1, inf)", whole=True)
    norm = _bonds.RMSDivide() @ _bonds.MeanSubtract() if layer_norm else Identity()
    attend = attention(width, heads, rope=context is None) @ norm
    nonlinear = _bonds.GELU(_bonds.GELU.LIPSCHITZ) / _bonds.GELU.LIPSCHITZ
    feed_forward = Linear(width, 4 * width) @ nonlinear @ Linear(4 * width, width) @ norm
    step = 1 / (2 * blocks)
    body = ((_residual(feed_forward, step) @ _residual(attend, step)) ** blocks).tare(absolute=mass)
    embedding = Embed(width, vocabulary)
    if context is not None:
        positions = Embed(width, context) @ _attention.Positions()
        embedding = (0.5 * embedding + 0.5 * positions).tare()
    return Linear(vocabulary, width) @ norm @ body @ embedding
