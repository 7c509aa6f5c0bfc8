"""Bonds that move entries about: heads, pooling, flattening, positions."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from manifoldmuon.modules._algebra import Bond
from manifoldmuon.modules._leaf import check_number


@dataclasses.dataclass(frozen=True)
class SplitHeads(Bond):
    """`(..., sequence, heads * dim)` to `(..., heads, sequence, dim)`.

    An isometry where the norm is the root mean square over the heads. In the largest norm of a
    head, which attention takes, a vector that lies in one head alone counts sqrt(heads) times as
    much; the declared 1 is that of vectors spread evenly.

    Attributes:
      heads: how many.
    """

    heads: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("SplitHeads.heads", self.heads, least=1.0)

    def forward(self, x: Float[Array, "*batch t d"]) -> Float[Array, "*batch h t e"]:
        if x.shape[-1] % self.heads:
            raise ValueError(f"{x.shape[-1]} features do not split into {self.heads} heads")
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.swapaxes(split, -3, -2)


@dataclasses.dataclass(frozen=True)
class MergeHeads(Bond):
    """`(..., heads, sequence, dim)` to `(..., sequence, heads * dim)`: undoes `SplitHeads`."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "*batch h t e"]) -> Float[Array, "*batch t d"]:
        moved = jnp.swapaxes(x, -3, -2)
        return moved.reshape(*moved.shape[:-2], math.prod(moved.shape[-2:]))


@dataclasses.dataclass(frozen=True)
class AveragePool(Bond):
    """Images `(..., height, width, channels)` averaged down to `rows` by `columns` pixels.

    Attributes:
      rows: pixels of the output, from top to bottom; must divide the height.
      columns: pixels of the output, from left to right; must divide the width.
    """

    rows: int = 1
    columns: int = 1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("AveragePool.rows", self.rows, least=1.0)
        check_number("AveragePool.columns", self.columns, least=1.0)

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
    """

    axes: int = 3
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_number("Flatten.axes", self.axes, least=1.0)

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if x.ndim < self.axes:
            raise ValueError(f"Flatten takes at least {self.axes} axes; got the shape {x.shape}")
        keep = x.ndim - self.axes
        return x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))


@dataclasses.dataclass(frozen=True)
class Positions(Bond):
    """Tokens `(..., sequence)` to the number of their place: 0, 1, 2, ...

    The sensitivity is declared as 1, that of the tokens beside it, so that token and position
    embeddings sum to a module of sensitivity 1 (modular norm, arXiv:2405.14813, appendix B.7).
    It is in truth 0.
    """

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Int[Array, "*batch t"]) -> Int[Array, "*batch t"]:
        return jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
