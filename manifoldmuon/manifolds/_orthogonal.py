"""Square matrices with orthonormal columns: the steepest direction in closed form."""

import dataclasses

import chex
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import MsignMethod, upcast
from manifoldmuon.manifolds import _matrices
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._points import require_axes, stay_if_still
from manifoldmuon.manifolds._scale import ScaleRule, check_scale, scale_of
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import SkewLift
from manifoldmuon.norms import Effort
from manifoldmuon.norms._matrix import cold_vector


@dataclasses.dataclass(frozen=True)
class Orthogonal(Manifold):
    """Square matrices `W^T W = s^2 I`.

    Tangent vectors at unit scale are `W X` with `X` skew, and under the spectral norm the
    steepest is `W msign(W^T G - G^T W)` (Modula documentation, orthogonal page), which equals
    `msign(G W^T - W G^T) W`, the closed form of `SkewLift`.

    Attributes:
      scale: the common singular value, a positive number or a rule such as `FanRatio()`.
      msign: how the sign is computed; None is that of `SkewLift`. Odd polynomials keep skew
        symmetry exactly; what another method breaks is repaired, and reported as residual.
      retraction: how a step returns to the set.
    """

    scale: float | ScaleRule = 1.0
    msign: MsignMethod | None = None
    retraction: Retraction = Polar()

    def __post_init__(self):
        check_scale("Orthogonal.scale", self.scale)

    @property
    def ndim(self) -> int:
        return 2

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)
        if shape[-2] != shape[-1]:
            raise ValueError(
                f"Orthogonal takes square matrices in the trailing two axes; got the shape "
                f"{tuple(shape)}. Use Stiefel() for rectangular ones"
            )

    def project(self, point: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
        return _matrices.project(point, self._scale(point))

    def tangent(
        self, point: Float[Array, "*batch n n"], vector: Float[Array, "*batch n n"]
    ) -> Float[Array, "*batch n n"]:
        unit = _matrices.unit_tall(point, self._scale(point))
        return _matrices.tangent_part(unit, upcast(vector)).astype(vector.dtype)

    def norm(self, vector: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
        return _matrices.spectral_size(vector, self._scale(vector))

    def init_carried(self, shape: tuple[int, ...]) -> Float[Array, "*batch n"]:
        return cold_vector(shape)

    def carried_norm(
        self, vector: Float[Array, "*batch n n"], carried: chex.ArrayTree, effort: Effort
    ) -> tuple[Float[Array, "*batch"], chex.ArrayTree]:
        return _matrices.carried_size(vector, self._scale(vector), carried, effort)

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def steepest(
        self, point: Float[Array, "*batch n n"], grad: Float[Array, "*batch n n"], dual
    ) -> Steepest:
        solver = SkewLift() if self.msign is None else SkewLift(self.msign)
        return _matrices.steepest(solver, point, grad, dual, self._scale(point))

    def retract(
        self, point: Float[Array, "*batch n n"], vector: Float[Array, "*batch n n"]
    ) -> Float[Array, "*batch n n"]:
        moved = _matrices.retract(self.retraction, point, vector, self._scale(point))
        return stay_if_still(point, vector, moved, 2)

    def random_point(
        self, key: PRNGKeyArray, shape: tuple[int, ...], dtype
    ) -> Float[Array, "*batch n n"]:
        self.check_shape(shape)
        return _matrices.random_matrix(key, shape, dtype, scale_of(self.scale, shape[-2:]))

    def distance(self, point: Float[Array, "*batch n n"]) -> Float[Array, "*batch"]:
        return _matrices.distance(point, self._scale(point))

    def _scale(self, point: Float[Array, "*batch n n"]) -> float:
        return scale_of(self.scale, point.shape[-2:])
