"""Matrices with orthonormal columns (or rows): the manifold of manifold Muon."""

import dataclasses

import chex
from jaxtyping import Array, Float, PRNGKeyArray

from manifoldmuon.linalg import upcast
from manifoldmuon.manifolds import _matrices
from manifoldmuon.manifolds._manifold import Manifold, Steepest
from manifoldmuon.manifolds._points import require_axes, stay_if_still
from manifoldmuon.manifolds._scale import ScaleRule, check_scale, scale_of
from manifoldmuon.manifolds.retractions import Polar, Retraction
from manifoldmuon.manifolds.solvers import ACCURATE, StiefelSolver
from manifoldmuon.norms import Effort
from manifoldmuon.norms._matrix import cold_vector, tall_view


@dataclasses.dataclass(frozen=True)
class Stiefel(Manifold):
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

    def __post_init__(self):
        check_scale("Stiefel.scale", self.scale)

    @property
    def ndim(self) -> int:
        return 2

    def check_shape(self, shape: tuple[int, ...]) -> None:
        require_axes(self, shape)

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
