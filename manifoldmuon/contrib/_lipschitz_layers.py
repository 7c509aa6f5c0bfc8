"""Layers with Lipschitz constant 1 in the Euclidean length, with their bounds and certificates.

With `Linear(m, n, Stiefel())`, of scale 1, they make networks with margins that certify labels (see
`robustness.certify`). Budgets of the atoms hold in the Euclidean length, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon import manifolds
from manifoldmuon._internal.arguments import check_number
from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon.bounds import RMS, LInf, LipschitzBounds, NormBound, propagate
from manifoldmuon.modules import Atom, Bond, Linear, Module
from manifoldmuon.norms import FanRatio, RMSToRMS, Spectral
from manifoldmuon.robustness import describe


@dataclasses.dataclass(frozen=True)
class LocallyConnected(Atom):
    """`x_p -> W_p x_p`: a separate matrix for every position, where `Linear` shares its matrix.

    Inputs are `(..., *places, fan_in)`. After `SpaceToDepth` it is a locally connected layer, a
    convolution with stride equal to its kernel size that shares no weights between positions; on
    rows of features, a block-diagonal matrix. The weight is `(*places, fan_out, fan_in)`; each
    matrix is measured as in `Linear`, and the largest norm counts.

    Attributes:
      places: lengths of the position axes, before the last, such as `(rows, columns)` of an image.
      fan_out: entries of the output at a position.
      fan_in: entries of the input at a position.
      manifold: `Euclidean(RMSToRMS())` (default), `Stiefel(FanRatio())`, or another that fits.
      mass: see `Module`.
    """

    places: tuple[int, ...]
    fan_out: int
    fan_in: int
    manifold: manifolds.Manifold = manifolds.Euclidean(RMSToRMS())
    mass: float = 1.0
    FREE_SPACE: ClassVar = manifolds.Euclidean(RMSToRMS())
    CONSTRAINT: ClassVar = manifolds.Stiefel(FanRatio())

    def __post_init__(self):
        if not isinstance(self.places, tuple) or not self.places:
            raise ValueError(
                "LocallyConnected.places must be a nonempty tuple of lengths; got "
                f"{self.places!r}. Without position axes, use Linear"
            )
        for size in self.places:
            check_number("LocallyConnected.places", size, within="[1, inf)", whole=True)
        super().__post_init__()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.places, self.fan_out, self.fan_in)

    def apply(self, params: Float[Array, "*places m n"], x: Floats) -> Floats:
        wanted = (*self.places, self.fan_in)
        if x.shape[-len(wanted) :] != wanted:
            sizes = ", ".join(str(size) for size in wanted)
            raise ValueError(f"LocallyConnected takes inputs (..., {sizes}); got {x.shape}")
        before = x.shape[: x.ndim - len(wanted)]
        matrices = params.reshape(-1, self.fan_out, self.fan_in)
        y = jnp.einsum("pmn,bpn->bpm", matrices, x.reshape(-1, len(matrices), self.fan_in))
        return y.reshape(*before, *self.places, self.fan_out)


@dataclasses.dataclass(frozen=True)
class TwoTap(Atom):
    """An orthogonal convolution with two taps along an axis, circular.

    With orthonormal columns U and `P = U U^T`, the part of x in the span of U moves by `offset`
    positions, and the rest stays: `y = x - P x + shift(P x)`. Every orthogonal convolution along an
    axis is a product of such factors and an orthogonal matrix (paraunitary filters; Su et al.,
    arXiv:2106.09121). Only the span matters, hence the Grassmann manifold.

    Attributes:
      channels: entries of the last axis.
      rank: columns of U, less than `channels`; the parameters are `(channels, rank)`.
      axis: axis of the shift: -2 for tokens or the columns of an image
        `(..., height, width, channels)`, -3 for its rows.
      offset: number of positions.
      manifold: spans. A step of norm 1 turns a span by at most half a radian, which moves an output
        by at most the length of the input.
      mass: see `Module`.
    """

    channels: int
    rank: int
    axis: int = -2
    offset: int = 1
    manifold: manifolds.Manifold = manifolds.Grassmann(step_norm=Spectral(scale=0.5))
    mass: float = 1.0
    ranges: ClassVar = {"axis": "[-3, -2]", "offset": "(-inf, inf)"}
    FREE_SPACE: ClassVar = manifolds.Euclidean(Spectral(scale=0.25))
    CONSTRAINT: ClassVar = manifolds.Grassmann(step_norm=Spectral(scale=0.5))
    entry: ClassVar = ("two_tap", "axis", "offset")

    def __post_init__(self):
        Module.__post_init__(self)  # before the manifold sees the shape
        if self.rank >= self.channels:
            raise ValueError(
                f"TwoTap.rank must be less than the {self.channels} channels; got {self.rank}"
            )
        super().__post_init__()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.rank)

    def apply(self, params: Float[Array, "c r"], x: Floats) -> Floats:
        self.expect_features(x, self.channels)
        if x.ndim < -self.axis:
            raise ValueError(f"TwoTap shifts along axis {self.axis}; got an input of {x.shape}")
        projected = jnp.matmul(jnp.matmul(x, params), params.T)
        return x - projected + jnp.roll(projected, self.offset, self.axis)


def orthogonal_conv2d(channels: int, kernel: int = 3) -> Module:
    """Return an orthogonal convolution of images `(..., height, width, channels)`, circular.

    An orthogonal matrix for the channels, then `kernel - 1` two-tap factors along each axis,
    alternating between the axes: like BCOP's blocks (Li et al., arXiv:1911.00937), it reaches
    kernels that do not separate into rows and columns. It takes `2 kernel - 1` products of channels
    instead of a dense kernel's `kernel**2`. For a stride, put `SpaceToDepth` and a `Linear` before.

    Args:
      channels: channels of input and output; at least 2.
      kernel: side of the kernel, in pixels.

    Examples:
      >>> orthogonal_conv2d(4, kernel=2).sensitivity
      1.0
    """
    check_number("orthogonal_conv2d(kernel)", kernel, within="[1, inf)", whole=True)
    net: Module = Linear(channels, channels, manifolds.Orthogonal())
    for tap in range(kernel - 1):
        for axis in (-3, -2):
            net = TwoTap(channels, channels // 2, axis, 1 if tap % 2 else -1) @ net
    return net


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


# The rule of `Linear` takes the largest of several matrices.
propagate.register(LocallyConnected, propagate.dispatch(Linear))


@propagate.register
def bound_two_tap(atom: TwoTap, weights: Any, x: NormBound) -> LipschitzBounds:
    """Bound the gain on an eigenvector of `U U^T` of eigenvalue p: `1 - p` stays and p moves.

    In length the gain is at most `|1 - p| + p`. In the largest norm of a pixel, with two pixels
    involved, it is the root of `2 ((1 - p)**2 + p**2)`. Both are convex in p, so that the smallest
    and the largest p decide.
    """
    read = LipschitzBounds.read_length(x, axes=-atom.axis, features=atom.channels)
    size = read.outputs
    most, turn = weights.spectral_norm(atom.shape)[0], weights.step_norm(atom.shape)
    p = most**2
    if size.norm == RMS():
        gain = math.sqrt(2) * max(1.0, math.hypot(1 - p, p))
    else:
        gain = max(1.0, 2 * p - 1)
    # The moving and the remaining part both change: twice the change of U U^T.
    step = 4 * most * turn
    out = size.within(gain, features=atom.channels)
    return read.then_of(out, gain, weights=size.within(step).upper)


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


@describe.register
def describe_locally_connected(module: LocallyConnected, params: Any, arrays: Any) -> list[Any]:
    kind = "locally_connected"
    return [{"kind": kind, "weight": arrays.add(kind, params), "axes": len(module.places)}]
