"""The interface of a retraction."""

from __future__ import annotations

import abc
from typing import ClassVar

from manifoldmuon._internal.arrays import Floats
from manifoldmuon._internal.values import Value


class Retraction(Value, abc.ABC):
    """Brings a point that moved along a tangent vector back to its set.

    A frozen, hashable value without arrays. Manifolds divide points and vectors by their scale,
    make matrices tall and the dtype float32 or wider, and cut a step longer than `longest` to that
    length, in the same direction. Leading axes are independent.

    Laws, which `testing.check_slopes` checks on a manifold that takes it: `R(W, 0) = W`;
    `R(W, t V) = W + t V + O(t**2)`; `R(W, V)` is on the set, to rounding, for every V as long as
    `longest`.

    Attributes:
      points: what it moves, such as "orthonormal matrices" (`W^T W = I`), "unit vectors" (in the
        last axis) or "matrices of norm at most 1" (the spectral norm). A manifold takes the
        retractions of its own kind of points.
      order: `R(W, t V)` differs by O(t**(order + 1)) from the geodesic of the embedded metric,
        the path that a point free of forces would take on the set.
      longest: the longest step that it takes, relative to the scale: the Euclidean norm or, of
        matrices, a bound of the spectral norm. By default 8, where a polar retraction has turned by
        83 of 90 degrees, and rounding leaves 32 times eps.
      wide: whether `retract` takes wide matrices as well, which spares transposing them.
      from_set: whether manifolds project points that are far off first. False to study what a
        retraction does by itself.

    Examples:
      >>> [(kind.__name__, kind().order) for kind in (Polar, QR, Normalize)]
      [('Polar', 2), ('QR', 1), ('Normalize', 2)]
    """

    points: ClassVar[tuple[str, ...]] = ("orthonormal matrices",)
    order: ClassVar[float]
    longest: ClassVar[float] = 8.0
    wide: ClassVar[bool] = False
    from_set: ClassVar[bool] = True

    @abc.abstractmethod
    def retract(self, point: Floats, vector: Floats) -> Floats:
        """Return a point of the set near `point + vector`, for a tangent `vector`."""
