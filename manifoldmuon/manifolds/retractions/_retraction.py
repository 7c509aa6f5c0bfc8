"""The interface of retractions."""

from __future__ import annotations

import abc
from typing import ClassVar

from manifoldmuon._internal.matrices.arrays import Floats
from manifoldmuon._internal.values import Value


class Retraction(Value, abc.ABC):
    """Base of retractions: bring a point that moved along a tangent vector back to its set.

    A frozen, hashable value without arrays. Manifolds divide points and vectors by their scale,
    make matrices tall and the dtype float32 or wider, and shorten steps longer than `longest` to
    that length. Leading axes are independent.

    Laws, checked by `testing.check_slopes` on a manifold with the retraction: `R(W, 0) = W`;
    `R(W, t V) = W + t V + O(t**2)`; `R(W, V)` is on the set, to rounding, for every V no longer
    than `longest`.

    Attributes:
      points: the kinds of points that it moves: "orthonormal matrices" (`W^T W = I`), "unit
        vectors" (in the last axis), "matrices of norm at most 1" (the spectral norm) or others. A
        manifold accepts the retractions of its own kind of points.
      order: `R(W, t V)` differs by O(t**(order + 1)) from the geodesic of the embedded metric, the
        path on the set of a point free of forces. Not set for balls and bands.
      longest: the longest step, relative to the scale: its Euclidean norm or, for matrices, a bound
        of its spectral norm. By default 8, where a polar retraction has turned by 83 of 90 degrees,
        and rounding leaves 32 times eps.
      wide: whether `retract` also takes wide matrices, which saves transposing them.
    """

    points: ClassVar[tuple[str, ...]] = ("orthonormal matrices",)
    order: ClassVar[float]
    longest: ClassVar[float] = 8.0
    wide: ClassVar[bool] = False

    @abc.abstractmethod
    def retract(self, point: Floats, vector: Floats) -> Floats:
        """Return a point of the set near `point + vector`, for a tangent `vector`."""
