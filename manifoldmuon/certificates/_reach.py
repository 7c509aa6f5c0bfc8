"""How large the weights on a manifold are, and the directions of norm 1."""

import dataclasses
import functools
import math

from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Orthogonal, Stiefel
from manifoldmuon.manifolds._scale import scale_of
from manifoldmuon.norms import ConvRMSToRMS, Frobenius, Infinity, L1ToRMS, RMSToRMS, Spectral


@dataclasses.dataclass(frozen=True)
class Reach:
    """Bounds on matrices: on every one of a stack, a kernel's taps included.

    Attributes:
      stretch: the largest singular value is at most this.
      row: the Euclidean length of every row is at most this.
      least_stretch: each singular value of a point of the manifold is at least this.
      least_row: and each row of it is at least as long as this.
    """

    stretch: float
    row: float
    least_stretch: float = 0.0
    least_row: float = 0.0


@functools.singledispatch
def reach(space: object, shape: tuple[int, ...]) -> Reach:
    """What holds for the points of a manifold and for the vectors of norm at most 1 in its norm.

    A generic function with one implementation for each type of manifold, and of the norms of flat
    space. Flat space constrains nothing: there, points are taken to have norm at most 1. To teach
    it another manifold, decorate a function of these arguments with
    `certificates.reach.register`.

    Args:
      space: a manifold or a norm.
      shape: of the weight; its last two axes are the rows and columns of a matrix.

    Raises:
      TypeError: the type has no implementation.
    """
    raise TypeError(
        f"it is not known how large the points of {type(space).__name__} are: decorate a function "
        "(manifold, shape) -> certificates.Reach with @certificates.reach.register"
    )


@reach.register
def _(space: Stiefel, shape: tuple[int, ...]) -> Reach:
    scale = scale_of(space.scale, shape[-2:])
    return Reach(scale, scale, scale, scale if shape[-2] <= shape[-1] else 0.0)


@reach.register
def _(space: Orthogonal, shape: tuple[int, ...]) -> Reach:
    scale = scale_of(space.scale, shape[-2:])
    return Reach(scale, scale, scale, scale)


@reach.register
def _(space: Hypersphere, shape: tuple[int, ...]) -> Reach:
    radius = scale_of(space.radius, shape[len(shape) - space.ndim :])
    return _rows(radius, shape) if space.ndim == 1 else Reach(radius, radius)


@reach.register
def _(space: EmbeddingRows, shape: tuple[int, ...]) -> Reach:
    return _rows(scale_of(space.radius, shape[-1:]), shape)


@reach.register
def _(space: Euclidean, shape: tuple[int, ...]) -> Reach:
    return reach(space.weight_norm, shape)


@reach.register
def _(space: RMSToRMS, shape: tuple[int, ...]) -> Reach:
    ratio = math.sqrt(shape[-2] / shape[-1])
    return Reach(ratio, ratio)


@reach.register
def _(space: ConvRMSToRMS, shape: tuple[int, ...]) -> Reach:
    ratio = math.sqrt(shape[-2] / shape[-1]) / math.prod(shape[-4:-2])
    return Reach(ratio, ratio)


@reach.register
def _(space: Spectral, shape: tuple[int, ...]) -> Reach:
    return Reach(1.0, 1.0)


@reach.register
def _(space: L1ToRMS, shape: tuple[int, ...]) -> Reach:
    return dataclasses.replace(_rows(math.sqrt(shape[-1]), shape), least_row=0.0)


@reach.register
def _(space: Frobenius, shape: tuple[int, ...]) -> Reach:
    if space.ndim == 0:
        return reach(Infinity(), shape)
    rows = dataclasses.replace(_rows(1.0, shape), least_row=0.0)
    return rows if space.ndim == 1 else Reach(1.0, 1.0)


@reach.register
def _(space: Infinity, shape: tuple[int, ...]) -> Reach:
    return Reach(math.sqrt(shape[-2] * shape[-1]), math.sqrt(shape[-1]))


def _rows(length: float, shape: tuple[int, ...]) -> Reach:
    """Rows of one length, in any directions: all of them may be parallel."""
    return Reach(math.sqrt(shape[-2]) * length, length, 0.0, length)
