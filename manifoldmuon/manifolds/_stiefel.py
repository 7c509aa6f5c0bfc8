"""Matrices with orthonormal columns (or rows): the manifold of manifold Muon."""

import dataclasses

import chex
from jaxtyping import Array, Float

from manifoldmuon.manifolds import _matrices
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds._orthonormal import Orthonormal
from manifoldmuon.manifolds._points import require_axes
from manifoldmuon.manifolds._scale import ScaleRule
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import ACCURATE, StiefelSolver


@dataclasses.dataclass(frozen=True)
class Stiefel(Orthonormal):
    """Matrices whose singular values all equal `scale`: `W^T W = s^2 I`, or `W W^T` if wide.

    At unit scale the tangent space is `sym(W^T A) = 0`. The direction that maximises `<G, A>`
    over tangent `A` of spectral norm at most 1 is what a solver finds, and certifies how close it
    came ("Modular Manifolds", Thinking Machines 2025; Modula documentation, Stiefel page). The
    default solver is a closed form, `msign(G W^T - W G^T) W`.

    Attributes:
      scale: the common singular value, a positive number or a rule such as `FanRatio()`
        (unit RMS-to-RMS norm).
      solver: what finds the steepest direction; see `manifolds.solvers`.
      retraction: how a step returns to the set.
    """

    scale: float | ScaleRule = 1.0
    solver: StiefelSolver = ACCURATE
    retraction: Retraction = Polar()

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)

    def init_dual(self, shape: tuple[int, ...]) -> chex.ArrayTree:
        *batch, m, n = shape
        return self.solver.init_dual((*batch, max(m, n), min(m, n)))

    def steepest(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        return _matrices.steepest(self.solver, point, grad, dual, self._scale(point))
