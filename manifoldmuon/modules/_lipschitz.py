"""Layers of networks with Lipschitz constant 1 in the Euclidean norm.

All of these keep or shrink distances in the Euclidean length of the whole input. With
`Linear(m, n, Stiefel())`, of scale 1, they make networks whose margins certify their labels (see
`bounds.L2`). The algebra's budgets hold in every norm in which the parts are as sensitive as
they declare; here that is the Euclidean length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon._internal.arguments import check_fields, check_number
from manifoldmuon._internal.arrays import nonzero_or_one
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Grassmann,
    Manifold,
    Orthogonal,
)
from manifoldmuon.modules._algebra import Bond, Module
from manifoldmuon.modules._atoms import Atom, Linear, check_atom, expect_features
from manifoldmuon.modules._plan import LINEAR, Sharpness
from manifoldmuon.norms import Frobenius, MaxRowNorm, RootDim, Spectral


@dataclasses.dataclass(frozen=True)
class Bias(Atom):
    """`x -> x + b` on the last axis. The start is zero.

    Attributes:
      features: entries of the last axis; the parameters are `(features,)`.
      manifold: flat space under the RMS norm (default), or another that fits.
      mass: the share of learning.
    """

    features: int
    manifold: Manifold = Euclidean(Frobenius(1, RootDim()))
    mass: float = 1.0
    sharpness: ClassVar[Sharpness] = LINEAR

    def __post_init__(self):
        check_atom(self, "features")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def free_space(self) -> Manifold:
        return Euclidean(Frobenius(1, RootDim()))

    def constraint(self) -> Manifold:
        """Flat space: nothing is gained by a bias of fixed length."""
        return self.free_space()

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Float[Array, " n"]:
        return jnp.zeros(self.shape, dtype)

    def apply(self, params: Float[Array, " n"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Bias", x, self.features)
        return x + params


@dataclasses.dataclass(frozen=True)
class GroupSort(Bond):
    """Sorts the entries of each group, the largest first (Anil et al., arXiv:1811.05381).

    The last axis of n entries falls into `n / size` groups: entries `i`, `i + n / size`,
    `i + 2 n / size`, ... are one. Sorting permutes entries, so that it keeps every norm that does
    not depend on their order, and never moves two inputs apart.

    Attributes:
      size: entries of a group; must divide the length of the last axis.
    """

    size: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, size="[1, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        features = x.shape[-1]
        if features % self.size:
            raise ValueError(f"{features} features do not fall into groups of {self.size}")
        if self.size == 2:
            first, second = jnp.split(x, 2, axis=-1)
            parts = [jnp.maximum(first, second), jnp.minimum(first, second)]
            return jnp.concatenate(parts, axis=-1)
        groups = x.reshape(*x.shape[:-1], self.size, features // self.size)
        return jnp.sort(groups, axis=-2, descending=True).reshape(x.shape)


def MaxMin() -> GroupSort:
    """`GroupSort(2)`: of each pair the larger entry, then the smaller one.

    Its derivative is an orthogonal matrix everywhere, so that gradients keep their length.
    """
    return GroupSort(2)


_HALF = math.sqrt(0.5)


@dataclasses.dataclass(frozen=True)
class Householder(Atom):
    """Learned reflections of pairs of entries (Singla et al., arXiv:2108.04062).

    Entries i and `i + features / 2` are a pair z with a unit vector v of its own: z stays where
    `<v, z> > 0`, else it becomes `z - 2 <v, z> v`. The start `v = (1, -1) / sqrt(2)` is `MaxMin`.

    Attributes:
      features: entries of the last axis, an even number; the parameters are `(features / 2, 2)`.
      manifold: rows of length 1, of which a step of norm 1 turns each by half a radian, for that
        moves an output at most by the length of its pair.
      mass: the share of learning.
    """

    features: int
    manifold: Manifold = EmbeddingRows(1.0, step_norm=MaxRowNorm(0.5))
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self, "features")
        if self.features % 2:
            raise ValueError(f"Householder.features must be even; got {self.features}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features // 2, 2)

    def free_space(self) -> Manifold:
        return Euclidean(MaxRowNorm(0.25))

    def constraint(self) -> Manifold:
        return EmbeddingRows(1.0, step_norm=MaxRowNorm(0.5))

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Float[Array, "n 2"]:
        return jnp.broadcast_to(jnp.asarray([_HALF, -_HALF], dtype), self.shape)

    def apply(self, params: Float[Array, "n 2"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("Householder", x, self.features)
        first, second = jnp.split(x, 2, axis=-1)
        v1, v2 = params[:, 0], params[:, 1]
        fold = 2 * jnp.minimum(v1 * first + v2 * second, 0)
        return jnp.concatenate([first - fold * v1, second - fold * v2], axis=-1)


@dataclasses.dataclass(frozen=True)
class TwoTap(Atom):
    """An orthogonal convolution with two taps along one axis, circular.

    With orthonormal columns U and `P = U U^T`, what lies in the span of U moves on by `offset`
    places, and the rest stays: `y = x - P x + shift(P x)`. Every orthogonal convolution along one
    axis is a product of such factors and one orthogonal matrix (paraunitary filters; Su et al.,
    arXiv:2106.09121). Only the span counts, hence the Grassmann manifold.

    Attributes:
      channels: entries of the last axis.
      rank: columns of U, less than `channels`; the parameters are `(channels, rank)`.
      axis: along which what is shifted: -2 for tokens or the columns of an image
        `(..., height, width, channels)`, -3 for its rows.
      offset: by how many places.
      manifold: spans, of which a step of norm 1 turns none by more than half a radian, for that
        moves an output at most by the length of the input.
      mass: the share of learning.
    """

    channels: int
    rank: int
    axis: int = -2
    offset: int = 1
    manifold: Manifold = Grassmann(step_norm=Spectral(scale=0.5))
    mass: float = 1.0

    def __post_init__(self):
        anything = "(-inf, inf)"
        check_fields(self, channels="[1, inf)", rank=anything, axis="[-3, -2]", offset=anything)
        if not 1 <= self.rank < self.channels:
            raise ValueError(
                f"TwoTap.rank must be at least 1 and less than the {self.channels} channels; got "
                f"{self.rank}"
            )
        check_atom(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.rank)

    def free_space(self) -> Manifold:
        return Euclidean(Spectral(scale=0.25))

    def constraint(self) -> Manifold:
        return Grassmann(step_norm=Spectral(scale=0.5))

    def apply(self, params: Float[Array, "c r"], x: Float[Array, "..."]) -> Float[Array, "..."]:
        expect_features("TwoTap", x, self.channels)
        if x.ndim < -self.axis:
            raise ValueError(f"TwoTap shifts along axis {self.axis}; got an input of {x.shape}")
        part = jnp.matmul(jnp.matmul(x, params), params.T)
        return x - part + jnp.roll(part, self.offset, self.axis)


def OrthogonalConv2D(channels: int, kernel: int = 3) -> Module:
    """An orthogonal convolution of images `(..., height, width, channels)`, circular.

    An orthogonal matrix for the channels, then `kernel - 1` two-tap factors along each axis,
    which take turns: as BCOP's blocks do (Li et al., arXiv:1911.00937), it reaches kernels that do
    not separate into rows and columns. It is orthogonal as long as its weights are on their
    manifolds, without any orthogonalisation in the forward pass, and takes `2 kernel - 1` products
    of channels where a dense kernel takes `kernel**2`. For a stride, put `SpaceToDepth` and a
    `Linear` before it.

    Args:
      channels: of input and output; at least 2.
      kernel: pixels along each side that an output pixel sees.
    """
    check_number("OrthogonalConv2D(kernel)", kernel, least=1.0, whole=True)
    net: Module = Linear(channels, channels, Orthogonal())
    for tap in range(kernel - 1):
        for axis in (-3, -2):
            net = TwoTap(channels, channels // 2, axis, 1 if tap % 2 else -1) @ net
    return net


@dataclasses.dataclass(frozen=True)
class SpaceToDepth(Bond):
    """Blocks of pixels as channels: an isometry, and half of a strided or patchwise convolution.

    `(..., height, width, channels)` to `(..., height / side, width / side, side**2 channels)`, the
    channels by row in the block, then column, then channel.

    Attributes:
      side: pixels of a block along each side; must divide height and width.
    """

    side: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, side="[1, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        blocks = _blocks("SpaceToDepth", x, self.side)
        return blocks.reshape(*blocks.shape[:-3], -1)


@dataclasses.dataclass(frozen=True)
class NormPool(Bond):
    """The Euclidean norm of each channel over blocks of pixels: pooling that keeps lengths.

    `(..., height, width, channels)` to `(..., height / side, width / side, channels)`. Two inputs
    never move apart; at a block of zeros the derivative is zero.

    Attributes:
      side: pixels of a block along each side; must divide height and width.
    """

    side: int
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, side="[1, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        square = jnp.sum(_blocks("NormPool", x, self.side) ** 2, axis=(-3, -2))
        return jnp.where(square == 0, 0, jnp.sqrt(nonzero_or_one(square)))


@dataclasses.dataclass(frozen=True)
class SwapAxes(Bond):
    """The last two axes exchanged: what follows mixes tokens in place of channels."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if x.ndim < 2:
            raise ValueError(f"SwapAxes takes at least two axes; got the shape {x.shape}")
        return jnp.swapaxes(x, -1, -2)


@dataclasses.dataclass(frozen=True)
class Shift(Bond):
    """Five groups of channels: one stays, the others move up, down, left and right, circularly.

    A permutation of the entries of an image `(..., height, width, channels)`, so that orthogonal
    matrices on the channels suffice to mix pixels (Hu et al., LipNeXt, arXiv:2601.18513). The
    groups are as `numpy.array_split` makes them.

    Attributes:
      pixels: how far.
    """

    pixels: int = 1
    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def __post_init__(self):
        check_fields(self, pixels="(-inf, inf)")

    def forward(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        if x.ndim < 3:
            raise ValueError(f"Shift takes (..., height, width, channels); got {x.shape}")
        stay, *moving = jnp.array_split(x, 5, axis=-1)
        ways = ((-self.pixels, -3), (self.pixels, -3), (-self.pixels, -2), (self.pixels, -2))
        moved = [jnp.roll(part, by, axis) for part, (by, axis) in zip(moving, ways, strict=True)]
        return jnp.concatenate([stay, *moved], axis=-1)


def _blocks(name: str, x: Float[Array, "..."], side: int) -> Float[Array, "..."]:
    """`(..., rows, columns, side, side, channels)`."""
    if x.ndim < 3 or x.shape[-3] % side or x.shape[-2] % side:
        raise ValueError(
            f"{name} takes (..., height, width, channels) with sides that {side} divides; got "
            f"{x.shape}"
        )
    *batch, height, width, channels = x.shape
    cut = x.reshape(*batch, height // side, side, width // side, side, channels)
    return jnp.swapaxes(cut, -4, -3)
