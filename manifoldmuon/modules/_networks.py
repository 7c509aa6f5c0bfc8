"""Published architectures without attention: MLP, ResMLP, ResCNN."""

from __future__ import annotations

from manifoldmuon._internal.arguments import check_number
from manifoldmuon.modules._algebra import Identity, Module
from manifoldmuon.modules._atoms import Conv2D, Linear
from manifoldmuon.modules._bonds import Abs, AveragePool, Flatten, MeanSubtract, ReLU, RMSDivide


def MLP(outputs: int, inputs: int, width: int, depth: int, activation: Module = ReLU()) -> Module:
    """`depth` linear layers with nonlinearities between them.

    Args:
      outputs: entries of the output.
      inputs: entries of the input.
      width: entries of the layers between.
      depth: linear layers; at least 2. Those in the middle are one `Stack`.
      activation: between two layers. The default declares sensitivity 1, so that every layer has
        the same budget.
    """
    check_number("MLP depth", depth, least=2.0, whole=True)
    first = activation @ Linear(width, inputs)
    middle = (activation @ Linear(width, width)) ** (depth - 2) if depth > 2 else Identity()
    body = middle @ first if depth > 2 else first
    return Linear(outputs, width) @ body


def residual(residue: Module, blocks: int) -> Module:
    """`((1 - 1/L) Identity + 1/L residue) ** L`.

    Of sensitivity 1 if the residue is, and of bounded sharpness at every depth (modular norm,
    arXiv:2405.14813, proposition 4).

    Args:
      residue: a module whose output is like its input.
      blocks: L.
    """
    check_number("residual blocks", blocks, least=1.0, whole=True)
    return ((1 - 1 / blocks) * Identity() + (1 / blocks) * residue) ** blocks


def ResMLP(
    outputs: int, inputs: int, width: int, blocks: int, block_depth: int = 2, mass: float = 1.0
) -> Module:
    """The residual MLP of the modular norm (arXiv:2405.14813, appendix B.5).

    Each residue is `MeanSubtract @ Abs @ Linear @ RMSDivide`, `block_depth` times.

    Args:
      outputs: entries of the output.
      inputs: entries of the input.
      width: entries of the residual stream.
      blocks: residual blocks.
      block_depth: layers in each.
      mass: of all blocks together, beside 1 for each of the first and last layers.
    """
    layer = MeanSubtract() @ Abs() @ Linear(width, width) @ RMSDivide()
    body = residual(layer**block_depth, blocks).tare(absolute=mass)
    return Linear(outputs, width) @ body @ Linear(width, inputs)


def ResCNN(
    outputs: int,
    channels: int,
    width: int,
    blocks: int,
    block_depth: int = 2,
    mass: float = 20.0,
    kernel: int = 3,
    pool: int = 1,
) -> Module:
    """The residual convolutional network of the same paper, for `(..., height, width, channels)`.

    As `ResMLP`, with convolutions; then average pooling, flattening and a linear head. Means and
    root mean squares are taken over the channels of each pixel.

    Args:
      outputs: entries of the output.
      channels: channels of the input.
      width: channels of the residual stream.
      blocks: residual blocks.
      block_depth: layers in each.
      mass: of all blocks together, beside 1 for each of the first and last layers.
      kernel: taps along each side of a convolution.
      pool: pixels along each side of the image that the head sees.
    """
    layer = MeanSubtract() @ Abs() @ Conv2D(width, width, kernel) @ RMSDivide()
    body = residual(layer**block_depth, blocks).tare(absolute=mass)
    head = Linear(outputs, pool * pool * width) @ Flatten(3) @ AveragePool(pool, pool)
    return head @ body @ Conv2D(width, channels, kernel)
