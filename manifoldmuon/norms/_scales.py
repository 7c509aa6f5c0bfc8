"""Rules for scales that depend on the shape of a weight."""

from __future__ import annotations

import dataclasses
import math

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of


def _sides(rule: ScaleRule, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        raise ValueError(f"{rule} is for matrices; got the shape {shape}. For vectors: RootDim()")
    return shape[-2:]


@dataclasses.dataclass(frozen=True)
class FanRatio(ScaleRule):
    """`gain * sqrt(fan_out / fan_in)` for a `(fan_out, fan_in)` matrix.

    A matrix with all singular values equal to this maps inputs with entries of size about 1 to
    outputs with entries of size about `gain`, at every width: an RMS-to-RMS norm of `gain`.

    Attributes:
      gain: a positive factor.
    """

    gain: float = 1.0

    def __post_init__(self):
        check_fields(self, gain="(0, inf)")

    def of(self, shape: tuple[int, ...]) -> float:
        fan_out, fan_in = _sides(self, shape)
        return self.gain * math.sqrt(fan_out / fan_in) if fan_out and fan_in else self.gain


@dataclasses.dataclass(frozen=True)
class RootDim(ScaleRule):
    """`gain * sqrt(d)` for a vector of `d` entries: a root-mean-square norm of `gain`.

    Attributes:
      gain: a positive factor.
    """

    gain: float = 1.0

    def __post_init__(self):
        check_fields(self, gain="(0, inf)")

    def of(self, shape: tuple[int, ...]) -> float:
        return self.gain * math.sqrt(max(math.prod(shape), 1))


@dataclasses.dataclass(frozen=True)
class RootRank(ScaleRule):
    """`sqrt(min(m, n))` times the scale of singular values: a Frobenius norm for a matrix.

    This is the Frobenius norm of a matrix with all singular values equal to `each`: on the sphere
    of this radius a direction with these singular values turns by an angle of 1 to first order.

    Attributes:
      each: the root-mean-square singular value, a positive number or a rule such as `FanRatio()`.
    """

    each: float | ScaleRule = 1.0

    def __post_init__(self):
        check_scale("RootRank.each", self.each)

    def of(self, shape: tuple[int, ...]) -> float:
        return scale_of(self.each, shape) * math.sqrt(max(min(_sides(self, shape)), 1))


@dataclasses.dataclass(frozen=True)
class Lipschitz(ScaleRule):
    """`constant / sqrt(overlap)`: for layers of at most this Lipschitz constant.

    The Lipschitz constant is Euclidean, and this scale the largest singular value, as on
    `Stiefel(Lipschitz())`, `SpectralBall`, or a sphere of `ndim=2`. A convolution is a matrix from
    patches to outputs; if a pixel is in at most `overlap` patches, `|y|^2 <= s^2 sum |patch|^2 <=
    s^2 overlap |x|^2`. With zero padding the overlap is `ceil(kernel / stride)` along each axis
    (their product), and 1 without overlapping patches. `frameworks.*.geometry` sets it for each
    module.

    Attributes:
      constant: the Lipschitz constant, positive.
      overlap: largest number of patches with the same pixel; 1 for matrices without convolution.

    Examples:
      >>> Lipschitz(overlap=2 * 2).of((8, 48))  # a kernel of 4 x 4 pixels and stride 2
      0.5
    """

    constant: float = 1.0
    overlap: int = 1

    def __post_init__(self):
        check_fields(self, constant="(0, inf)", overlap="[1, inf)")

    def of(self, shape: tuple[int, ...]) -> float:
        return self.constant / math.sqrt(self.overlap)
