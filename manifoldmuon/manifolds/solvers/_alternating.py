"""Alternating projection between the tangent space and the matrix signs (Cesista, 2025)."""

import dataclasses

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import DEFAULT_MSIGN, MsignMethod, msign, prescale, skew, sym
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import frobenius, nuclear_bound
from manifoldmuon.manifolds.solvers._iterate import iterate
from manifoldmuon.manifolds.solvers._solver import MemorylessSolver
from manifoldmuon.manifolds.solvers._split import split
from manifoldmuon.manifolds.solvers._stacked import finish, halves, stack


@dataclasses.dataclass(frozen=True)
class AlternatingProjection(MemorylessSolver):
    """`A <- msign(A - W sym(W^T A))` from `A = G`.

    It converges to a direction that is tangent and has orthonormal columns, as a rule not the
    steepest: on well-conditioned gradients it comes close, on others more steps drift away from
    the optimum. For comparison; there is no dual variable to carry.

    Attributes:
      steps: the iteration budget.
      tolerance: on concrete arrays, stop once `||W^T A + A^T W||_F / n` is below it.
      method: the matrix sign; it acts on `2n x n` matrices.
    """

    steps: int = 10
    tolerance: float = 1e-6
    method: MsignMethod = DEFAULT_MSIGN

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        parts = split(point, prescale(grad, ndim=2)[0])
        start = stack(parts, jnp.zeros_like(parts.inner))
        first = msign(start, self.method)

        def project(k, candidate):
            del k
            along, across = halves(candidate)
            moved = msign(jnp.concatenate([skew(along), across], axis=-2), self.method)
            return moved, 2 * frobenius(sym(along)) / max(point.shape[-1], 1)

        candidate = iterate(project, first, self.steps - 1, self.tolerance)
        return finish(parts, candidate, nuclear_bound(start, first), dual)
