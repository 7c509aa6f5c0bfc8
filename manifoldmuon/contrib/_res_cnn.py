"""The convolutional network of the modular norm (arXiv:2405.14813, appendix B.5)."""

from __future__ import annotations

from manifoldmuon.modules import (
    Abs,
    AveragePool,
    Conv2D,
    Flatten,
    Linear,
    MeanSubtract,
    Module,
    RMSDivide,
    residual,
)


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
    """Return the residual convolutional network of the modular norm, for images with channels last.

    As `modules.res_mlp`, with convolutions; then average pooling, flattening and a linear head.
    Means and root mean squares are taken over the channels of each pixel.

    Args:
      outputs: entries of the output.
      channels: channels of the input.
      width: channels of the residual stream.
      blocks: residual blocks.
      block_depth: layers in each.
      mass: of all blocks together, beside 1 for each of the first and last layers.
      kernel: taps along each side of a convolution.
      pool: pixels along each side of the image that the head sees.

    Examples:
      >>> res_cnn(10, 3, 32, blocks=2).mass
      22.0
    """
    layer = MeanSubtract() @ Abs() @ Conv2D(width, width, kernel) @ RMSDivide()
    body = residual(layer**block_depth, blocks).tare(absolute=mass)
    head = Linear(outputs, pool * pool * width) @ Flatten(3) @ AveragePool(pool, pool)
    return head @ body @ Conv2D(width, channels, kernel)
