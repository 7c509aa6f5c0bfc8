"""Bonds with Lipschitz constant 1 that move entries of images and tokens, with their bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import Floats, nonzero_or_one
from manifoldmuon.bounds import RMS, LInf, LipschitzBounds, NormBound, propagate
from manifoldmuon.modules import Bond


@dataclasses.dataclass(frozen=True)
class SpaceToDepth(Bond):
    """Turn blocks of pixels into channels: an isometry, half of a strided or patchwise convolution.

    Maps `(..., height, width, channels)` to `(..., height / side, width / side, side**2 channels)`,
    with channels ordered by row in the block, then column, then channel.

    Attributes:
      side: pixels of a block along each side; must divide height and width.

    Examples:
      >>> SpaceToDepth(2).forward(jnp.ones((4, 6, 3))).shape
      (2, 3, 12)
    """

    side: int
    entry: ClassVar = ("space_to_depth", "side")

    def forward(self, x: Floats) -> Floats:
        blocks = _blocks("SpaceToDepth", x, self.side)
        return blocks.reshape(*blocks.shape[:-3], -1)


@dataclasses.dataclass(frozen=True)
class NormPool(Bond):
    """Take the Euclidean norm of each channel over blocks of pixels: pooling that keeps lengths.

    Maps `(..., height, width, channels)` to `(..., height / side, width / side, channels)`. Two
    inputs never move apart; at a block of zeros the derivative is zero.

    Attributes:
      side: pixels of a block along each side; must divide height and width.

    Examples:
      >>> NormPool(2).forward(jnp.ones((2, 2, 1))).item()
      2.0
    """

    side: int
    entry: ClassVar = ("norm_pool", "side")

    def forward(self, x: Floats) -> Floats:
        square = jnp.sum(_blocks("NormPool", x, self.side) ** 2, axis=(-3, -2))
        return jnp.where(square == 0, 0, jnp.sqrt(nonzero_or_one(square)))


@dataclasses.dataclass(frozen=True)
class SwapAxes(Bond):
    """Swap the last two axes, so that the next layer mixes tokens instead of channels.

    Examples:
      >>> SwapAxes().forward(jnp.ones((4, 6))).shape
      (6, 4)
    """

    entry: ClassVar = ("swap_axes",)

    def forward(self, x: Floats) -> Floats:
        if x.ndim < 2:
            raise ValueError(f"SwapAxes takes at least two axes; got the shape {x.shape}")
        return jnp.swapaxes(x, -1, -2)


@dataclasses.dataclass(frozen=True)
class Shift(Bond):
    """Shift four of five groups of channels up, down, left and right, circularly.

    A permutation of the entries of an image `(..., height, width, channels)`, so that orthogonal
    matrices on the channels suffice to mix pixels (Hu et al., LipNeXt, arXiv:2601.18513). The
    first group stays; `numpy.array_split` makes the groups.

    Attributes:
      pixels: length of the shift.

    Examples:
      >>> Shift().forward(jnp.ones((4, 6, 5))).shape
      (4, 6, 5)
    """

    pixels: int = 1
    ranges: ClassVar = {"pixels": "(-inf, inf)"}
    entry: ClassVar = ("shift", "pixels")

    def forward(self, x: Floats) -> Floats:
        if x.ndim < 3:
            raise ValueError(f"Shift takes (..., height, width, channels); got {x.shape}")
        stay, *moving = jnp.array_split(x, 5, axis=-1)
        ways = ((-self.pixels, -3), (self.pixels, -3), (-self.pixels, -2), (self.pixels, -2))
        moved = [jnp.roll(part, by, axis) for part, (by, axis) in zip(moving, ways, strict=True)]
        return jnp.concatenate([stay, *moved], axis=-1)


def _blocks(name: str, x: Floats, side: int) -> Floats:
    """Return blocks of pixels, `(..., rows, columns, side, side, channels)`."""
    if x.ndim < 3 or x.shape[-3] % side or x.shape[-2] % side:
        raise ValueError(
            f"{name} takes (..., height, width, channels) with sides that {side} divides; got "
            f"{x.shape}"
        )
    *batch, height, width, channels = x.shape
    cut = x.reshape(*batch, height // side, side, width // side, side, channels)
    return jnp.swapaxes(cut, -4, -3)


@propagate.register
def bound_space_to_depth(bond: SpaceToDepth, weights: Any, x: NormBound) -> LipschitzBounds:
    features = x.features and bond.side**2 * x.features
    read = LipschitzBounds.read_length(x, axes=3)
    return read.then_of(dataclasses.replace(read.outputs, features=features), 1.0)


@propagate.register
def bound_norm_pool(bond: NormPool, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound pooling: in the largest RMS norm of a pixel, all pixels of a block may move at once."""
    read, length = LipschitzBounds.read_length(x, axes=3), x.is_length(3)
    slope = 1.0 if length else float(bond.side)
    out = x if length else read.outputs.within(slope)
    return read.then_of(out, slope)


@propagate.register
def bound_swap_axes(bond: SwapAxes, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound swapped axes: separate vectors mix, which leaves the largest entry, no lower bound."""
    if x.is_length(2):
        return LipschitzBounds.of(dataclasses.replace(x, features=None), 1.0)
    read = LipschitzBounds.convert_norm(x, LInf())
    return read.then_of(read.outputs.within(features=None), 1.0)


@propagate.register
def bound_shift(bond: Shift, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound a shift: five pixels meet in each pixel, with a group of channels each."""
    if x.is_length(3) or x.norm == LInf():
        return LipschitzBounds.of(x if x.is_length(3) else x.within(), 1.0)
    read, root = LipschitzBounds.convert_norm(x, RMS()), math.sqrt(5)
    return read.then_of(read.outputs.within(root), root)
