"""Dual ascent: the published algorithm for manifold Muon (Bernstein, Modula docs, 2025)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import DEFAULT_MSIGN, MsignMethod, msign, prescale, sym
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import frobenius, nuclear_bound
from manifoldmuon.manifolds.solvers._iterate import iterate
from manifoldmuon.manifolds.solvers._split import split
from manifoldmuon.manifolds.solvers._stacked import DualSolver, finish, halves, scale_of, stack


@dataclasses.dataclass(frozen=True)
class DualAscent(DualSolver):
    """Subgradient steps: `A = msign(G + 2 W L)`, `L <- L - step (1 - k/K) (W^T A + A^T W)`.

    The published step size is a number without units while `L` has those of the gradient, so the
    published loop depends on the gradient's scale: `relative=False` keeps it that way, for
    comparison. The default measures the step in the gradient's own scale.

    Attributes:
      step: the first step size; it falls linearly to zero. Published: 0.01, absolute.
      steps: the iteration budget `K`. Published: 100.
      tolerance: on concrete arrays, stop once `||W^T A + A^T W||_F / n` is below it.
      relative: whether `step` is in units of the gradient's root mean square singular value.
      method: the matrix sign; it acts on `2n x n` matrices.
    """

    step: float = 0.3
    steps: int = 100
    tolerance: float = 1e-6
    relative: bool = True
    method: MsignMethod = DEFAULT_MSIGN

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Float[Array, "*batch n n"],
    ) -> Steepest:
        # The published loop sees the gradient as it came: its scale is part of the algorithm.
        parts = split(point, prescale(grad, ndim=2)[0] if self.relative else grad)
        scale = scale_of(parts)
        step_size = self.step if self.relative else self.step / scale

        def ascend(k, shift):
            candidate = msign(stack(parts, shift, scale), self.method)
            residual = 2 * sym(halves(candidate)[0])
            # T = sym(W^T G) + 2 L moves by twice the step of L.
            shift = shift - 2 * step_size * (1 - k / self.steps) * residual
            return shift, frobenius(residual) / max(point.shape[-1], 1)

        shift = iterate(ascend, dual, self.steps, self.tolerance)
        reduced = stack(parts, shift, scale)
        candidate = msign(reduced, self.method)
        upper = nuclear_bound(reduced, candidate) * jnp.squeeze(scale, (-2, -1))
        return finish(parts, candidate, upper, shift)
