"""What the manifolds of matrices with equal singular values have in common."""

import chex
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import upcast
from manifoldmuon.manifolds import _matrices
from manifoldmuon.manifolds._manifold import Manifold
from manifoldmuon.manifolds._points import stay_if_still
from manifoldmuon.manifolds._scale import ScaleRule, check_scale, scale_of
from manifoldmuon.manifolds.retractions import Retraction
from manifoldmuon.norms import Effort
from manifoldmuon.norms._matrix import cold_vector, tall_view


class Orthonormal(Manifold):
    """Matrices whose singular values all equal `scale`; which shapes, and how directions are found,
    is the subclass's, a dataclass with the fields `scale` and `retraction`.
    """

    scale: float | ScaleRule
    retraction: Retraction

    def __post_init__(self):
        check_scale(f"{type(self).__name__}.scale", self.scale)

    @property
    def ndim(self) -> int:
        return 2

    def project(self, point: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        return _matrices.project(point, self._scale(point))

    def tangent(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        unit = _matrices.unit_tall(point, self._scale(point))
        part = _matrices.tangent_part(unit, tall_view(upcast(vector)))
        return _matrices.like(part, vector, 1.0)

    def norm(self, vector: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
        return _matrices.spectral_size(vector, self._scale(vector))

    def init_carried(self, shape: tuple[int, ...]) -> Float[Array, "*batch n"]:
        return cold_vector(shape)

    def carried_norm(
        self, vector: Float[Array, "*batch m n"], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "*batch"], chex.ArrayTree]:
        return _matrices.carried_size(vector, self._scale(vector), carried, effort)

    def retract(
        self, point: Float[Array, "*batch m n"], vector: Float[Array, "*batch m n"]
    ) -> Float[Array, "*batch m n"]:
        moved = _matrices.retract(self.retraction, point, vector, self._scale(point))
        return stay_if_still(point, vector, moved, 2)

    def random_point(
        self, key: PRNGKeyArray, shape: tuple[int, ...], dtype
    ) -> Float[Array, "*batch m n"]:
        self.check_shape(shape)
        return _matrices.random_matrix(key, shape, dtype, scale_of(self.scale, shape[-2:]))

    def distance(self, point: Float[Array, "*batch m n"]) -> Float[Array, "*batch"]:
        return _matrices.distance(point, self._scale(point))

    def _scale(self, point: Float[Array, "*batch m n"]) -> float:
        return scale_of(self.scale, point.shape[-2:])
