"""Bonds that change the shape of images."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon._internal.arrays import Floats
from manifoldmuon.modules._module import Bond


@dataclasses.dataclass(frozen=True)
class AveragePool(Bond):
    """Images `(..., height, width, channels)` averaged down to `rows` by `columns` pixels.

    Attributes:
      rows: pixels of the output, from top to bottom; must divide the height.
      columns: pixels of the output, from left to right; must divide the width.

    Examples:
      >>> AveragePool(2, 2).forward(jnp.ones((8, 6, 3))).shape
      (2, 2, 3)
    """

    rows: int = 1
    columns: int = 1
    entry: ClassVar = ("average_pool", "rows", "columns")

    def forward(self, x: Float[Array, "*batch h w c"]) -> Float[Array, "*batch r s c"]:
        *batch, height, width, channels = x.shape
        if height % self.rows or width % self.columns:
            raise ValueError(
                f"an image of {height} by {width} pixels does not divide into {self.rows} by "
                f"{self.columns}"
            )
        rows, columns = height // self.rows, width // self.columns
        blocks = x.reshape(*batch, self.rows, rows, self.columns, columns, channels)
        return jnp.mean(blocks, axis=(-4, -2))


@dataclasses.dataclass(frozen=True)
class Flatten(Bond):
    """The last axes as one: the RMS norm of all is at most the largest of the parts.

    Attributes:
      axes: how many; 3 for images.

    Examples:
      >>> Flatten().forward(jnp.ones((5, 8, 6, 3))).shape
      (5, 144)
    """

    axes: int = 3
    entry: ClassVar = ("flatten", "axes")

    def forward(self, x: Floats) -> Floats:
        if x.ndim < self.axes:
            raise ValueError(f"Flatten takes at least {self.axes} axes; got the shape {x.shape}")
        keep = x.ndim - self.axes
        return x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))
