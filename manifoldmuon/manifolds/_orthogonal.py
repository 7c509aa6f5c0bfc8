"""Square matrices with orthonormal columns: the steepest direction in closed form."""

import dataclasses

from jaxtyping import Array, Float

from manifoldmuon.linalg import MsignMethod
from manifoldmuon.manifolds import _matrices
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds._orthonormal import Orthonormal
from manifoldmuon.manifolds._points import require_axes
from manifoldmuon.manifolds._scale import ScaleRule
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import SkewLift


@dataclasses.dataclass(frozen=True)
class Orthogonal(Orthonormal):
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

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)
        if shape[-2] != shape[-1]:
            raise ValueError(
                f"Orthogonal takes square matrices in the trailing two axes; got the shape "
                f"{tuple(shape)}. Use Stiefel() for rectangular ones"
            )

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        return ()

    def steepest(
        self, point: Float[Array, "*batch n n"], grad: Float[Array, "*batch n n"], dual
    ) -> Steepest:
        solver = SkewLift() if self.msign is None else SkewLift(self.msign)
        return _matrices.steepest(solver, point, grad, dual, self._scale(point))
