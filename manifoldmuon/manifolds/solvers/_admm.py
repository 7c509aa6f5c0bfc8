"""ADMM on the dual: singular-value thresholding against a projection."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from manifoldmuon.linalg import mT, prescale, sym
from manifoldmuon.manifolds._manifold import Steepest
from manifoldmuon.manifolds.solvers._certificate import frobenius
from manifoldmuon.manifolds.solvers._iterate import iterate
from manifoldmuon.manifolds.solvers._solver import StiefelSolver
from manifoldmuon.manifolds.solvers._split import split
from manifoldmuon.manifolds.solvers._stacked import (
    finish,
    halves,
    nuclear_norm,
    scale_of,
    stack,
)


class Dual(NamedTuple):
    """Where the next, nearby problem starts: `T / scale`, and the direction in `[W, Q]`."""

    shift: Float[Array, "*batch n n"]
    direction: Float[Array, "*batch rows n"]


def _clip(x: Float[Array, "*batch m n"], bound: Float[Array, "*batch 1 1"]):
    """`x` with its singular values cut off at `bound`: what soft-thresholding removes."""
    values, basis = jnp.linalg.eigh(sym(mT(x) @ x))
    lengths = jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
    factors = jnp.where(lengths > bound, bound / jnp.where(lengths > bound, lengths, 1), 1)
    return x @ (basis * factors) @ mT(basis)


@dataclasses.dataclass(frozen=True)
class ADMM(StiefelSolver):
    """Splits `Z = [T + Omega; R]` from `T`: a thresholding step, a projection step, a multiplier.

    The multiplier divided by the threshold is a direction of norm at most 1 at every iteration.

    Attributes:
      steps: the iteration budget.
      tolerance: on concrete arrays, stop once both residuals are below it, relative to the
        gradient's root mean square singular value.
      threshold: the first soft threshold, in the same unit.
      relaxation: over-relaxation, between 1 and 2 (Boyd et al. 2011, section 3.4.3).
      balance: how far the two residuals may drift apart, as a factor, before the threshold moves.
    """

    steps: int = 30
    tolerance: float = 1e-6
    threshold: float = 1.5
    relaxation: float = 1.6
    balance: float = 3.0

    def init_dual(self, shape: tuple[int, ...]) -> Dual:
        *batch, _, n = shape
        return Dual(jnp.zeros((*batch, n, n)), jnp.zeros((*batch, 2 * n, n)))

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: Dual,
    ) -> Steepest:
        parts = split(point, prescale(grad, ndim=2)[0])
        scale = scale_of(parts)
        fixed = stack(parts, jnp.zeros_like(dual.shift), scale)
        n = max(point.shape[-1], 1)

        def step(k, state):
            shift, split_copy, direction, threshold = state
            target = stack(parts, shift, scale)
            relaxed = self.relaxation * target + (1 - self.relaxation) * split_copy
            pushed = relaxed + threshold * direction
            clipped = _clip(pushed, threshold)
            thresholded = pushed - clipped
            direction = clipped / threshold
            shift = sym(halves(thresholded - clipped - fixed)[0])
            primal = frobenius(stack(parts, shift, scale) - thresholded)
            dual_error = frobenius(thresholded - split_copy)
            factor = jnp.where(
                primal > self.balance * dual_error,
                0.5,
                jnp.where(dual_error > self.balance * primal, 2.0, 1.0),
            )
            # Balancing must end, or it cycles with the iteration: after half of the budget it does.
            factor = jnp.where(k < self.steps // 2, factor, 1.0)[..., None, None]
            error = jnp.maximum(primal, dual_error) / n
            return (shift, thresholded, direction, threshold * factor), error

        start = stack(parts, dual.shift, scale)
        state = (dual.shift, start, dual.direction, jnp.full_like(scale, self.threshold))
        shift, _, direction, _ = iterate(step, state, self.steps, self.tolerance)
        upper = nuclear_norm(stack(parts, shift, scale)) * jnp.squeeze(scale, (-2, -1))
        return finish(parts, direction, upper, Dual(shift, direction))
