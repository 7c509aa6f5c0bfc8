"""Bonds with Lipschitz constant 1 that move entries of images, with their bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp

from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon.bounds import RMS, LInf, LipschitzBounds, NormBound, propagate
from manifoldmuon.modules import Bond


@dataclasses.dataclass(frozen=True)
class SpaceToDepth(Bond):
    """Turn blocks of pixels into channels: an isometry, half of a strided or patchwise convolution.

    Maps `(..., height, width, channels)` to `(..., height / side, width / side, side**2 channels)`,
    with channels ordered by row in the block, then column, then channel.

    Attributes:
      side: pixels of a block along each side; must divide height and width.
    """

    side: int
    entry: ClassVar = ("space_to_depth", "side")

    def forward(self, x: Floats) -> Floats:
        side = self.side
        if x.ndim < 3 or x.shape[-3] % side or x.shape[-2] % side:
            raise ValueError(
                f"SpaceToDepth takes (..., height, width, channels) with sides that {side} divides;"
                f" got {x.shape}"
            )
        *batch, height, width, channels = x.shape
        cut = x.reshape(*batch, height // side, side, width // side, side, channels)
        return jnp.swapaxes(cut, -4, -3).reshape(*batch, height // side, width // side, -1)


@dataclasses.dataclass(frozen=True)
class Shift(Bond):
    """Shift four of five groups of channels up, down, left and right, circularly.

    A permutation of the entries of an image `(..., height, width, channels)`, so that orthogonal
    matrices on the channels suffice to mix pixels (Hu et al., LipNeXt, arXiv:2601.18513). The
    first group stays; `numpy.array_split` makes the groups.

    Attributes:
      pixels: length of the shift.
    """

    pixels: int = 1
    ranges: ClassVar = {"pixels": "(-inf, inf)"}
    entry: ClassVar = ("shift", "pixels")

    def forward(self, x: Floats) -> Floats:
        if x.ndim < 3:
            raise ValueError(f"Shift takes (..., height, width, channels); got {x.shape}")
        stay, *moving = jnp.array_split(x, 5, axis=-1)
        ways = ((-self.pixels, -3), (self.pixels, -3), (-self.pixels, -2), (self.pixels, -2))
        rolled = [jnp.roll(chunk, by, axis) for chunk, (by, axis) in zip(moving, ways, strict=True)]
        return jnp.concatenate([stay, *rolled], axis=-1)


@propagate.register
def bound_space_to_depth(bond: SpaceToDepth, weights: Any, x: NormBound) -> LipschitzBounds:
    features = x.features and bond.side**2 * x.features
    read = LipschitzBounds.read_length(x, axes=3)
    return read.then_of(dataclasses.replace(read.outputs, features=features), 1.0)


@propagate.register
def bound_shift(bond: Shift, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound a shift: five pixels meet in each pixel, with a group of channels each."""
    if x.is_length(3) or x.norm == LInf():
        return LipschitzBounds.of(x if x.is_length(3) else x.within(), 1.0)
    read, root = LipschitzBounds.convert_norm(x, RMS()), math.sqrt(5)
    return read.then_of(read.outputs.within(root), root)
