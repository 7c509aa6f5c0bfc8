"""The two-dimensional convolution."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from manifoldmuon.manifolds import Euclidean, FanRatio, Manifold, Stiefel
from manifoldmuon.modules._atom import Atom, check_atom, expect_features
from manifoldmuon.modules._leaf import check_number
from manifoldmuon.norms import ConvRMSToRMS


@dataclasses.dataclass(frozen=True)
class Conv2D(Atom):
    """A convolution (cross-correlation) of images `(..., height, width, channels)`, no bias.

    The kernel is `(kernel, kernel, out_channels, in_channels)`: one matrix for each tap. Its norm
    is `kernel**2` times the largest RMS-to-RMS norm of a tap. The norm of an image is the largest
    RMS norm of a pixel; with it the layer is well-normed at every stride and padding.

    Attributes:
      out_channels: channels of the output.
      in_channels: channels of the input.
      kernel: taps along each side.
      stride: pixels from one output pixel to the next.
      padding: zeros around the image, on all four sides. None: as many as keep the size at
        stride 1 (for an even kernel one more at the bottom and on the right).
      manifold: `Euclidean(ConvRMSToRMS())` (default), `Stiefel(FanRatio(1 / kernel**2))` tap by
        tap, or another that fits.
      mass: the share of learning.
    """

    out_channels: int
    in_channels: int
    kernel: int = 3
    stride: int = 1
    padding: int | None = None
    manifold: Manifold = Euclidean(ConvRMSToRMS())
    mass: float = 1.0

    def __post_init__(self):
        check_atom(self)
        check_number("Conv2D.stride", self.stride, least=1.0)
        if self.padding is not None:
            check_number("Conv2D.padding", self.padding, least=0.0)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.kernel, self.kernel, self.out_channels, self.in_channels)

    def unconstrained(self) -> Manifold:
        return Euclidean(ConvRMSToRMS())

    def curved(self) -> Manifold:
        return Stiefel(FanRatio(1 / self.kernel**2))

    def apply(self, params: Float[Array, "k k m n"], x: Any) -> Float[Array, "..."]:
        expect_features("Conv2D", x, self.in_channels)
        if x.ndim < 3:
            raise ValueError(f"Conv2D takes (..., height, width, channels); got {x.shape}")
        pixels = x.reshape(-1, *x.shape[-3:])
        sides = (self.kernel - 1) // 2, self.kernel // 2
        pad = sides if self.padding is None else (self.padding, self.padding)
        y = jax.lax.conv_general_dilated(
            pixels,
            params,
            (self.stride, self.stride),
            (pad, pad),
            dimension_numbers=("NHWC", "HWOI", "NHWC"),
        )
        return y.reshape(*x.shape[:-3], *y.shape[1:])
