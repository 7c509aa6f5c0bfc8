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
    """Average images `(..., height, width, channels)` down to `rows` by `columns` pixels.

    Attributes:
      rows: height of the output in pixels; must divide the input's height.
      columns: width of the output in pixels; must divide the input's width.

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
    """Merge the last axes into a single axis.

    The RMS norm of the result is at most the largest RMS norm over the last input axis.

    Attributes:
      axes: number of axes to merge; 3 for images.

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
