"""The interface of a retraction on the Stiefel manifold."""

import abc
from typing import ClassVar

from jaxtyping import Array, Float


class Retraction(abc.ABC):
    """Moves an orthonormal matrix along a tangent vector, and back onto the set.

    A frozen, hashable value without arrays. Points are tall or square with `W^T W = I` and
    vectors tangent, `sym(W^T V) = 0`; the manifolds transpose wide matrices, divide by their
    scale, and make the dtype float32 or wider. Leading axes are independent.

    Laws: `R(W, 0) = W`; `R(W, t V) = W + t V + O(t**2)`.

    Attributes:
      order: `R(W, t V)` differs by O(t**(order + 1)) from the geodesic of the embedded metric,
        the path that a point free of forces would take on the set.
    """

    order: ClassVar[float]

    @abc.abstractmethod
    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        """An orthonormal matrix near `point + vector`, for a tangent `vector`."""
