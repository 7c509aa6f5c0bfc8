"""Gaps of the directions of a Stiefel solver along a training run."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.manifolds.solvers import Steepest, StiefelSolver
from manifoldmuon.norms import Spectral
from manifoldmuon.testing import stiefel_errors


class SolverGaps(NamedTuple):
    """Gaps of a solver's directions, one number for each window.

    Attributes:
      cold: the gap to the optimum from a cold start.
      warm: the same with the dual variables that the steps before have left.
      residual_cold: how far the raw direction is from the tangent space.
      residual_warm: likewise.
      reported_cold: the gap that the solver reports itself.
    """

    cold: list[float]
    warm: list[float]
    residual_cold: Float[Array, " windows"]
    residual_warm: Float[Array, " windows"]
    reported_cold: Float[Array, " windows"]


def solver_gaps(
    solver: StiefelSolver,
    points: Float[np.ndarray, "steps windows m n"],
    grads: Float[np.ndarray, "steps windows m n"],
) -> SolverGaps:
    """The gap of the last problem of each window, cold and after all that went before it.

    Gaps are those of the direction once it is made feasible, relative to the optimum, computed
    in float64 and without the solver.

    Args:
      solver: which.
      points: on the Stiefel manifold of scale 1, `m >= n`: consecutive steps of every window.
      grads: the gradients (or momenta) there.
    """
    cold, warm = _cold_and_warm(solver, jnp.asarray(points), jnp.asarray(grads))
    gaps = [
        [
            max(stiefel_errors(point, grad, direction).gap, 0.0)
            for point, grad, direction in zip(
                points[-1], grads[-1], np.asarray(answer.direction), strict=True
            )
        ]
        for answer in (cold, warm)
    ]
    return SolverGaps(gaps[0], gaps[1], cold.residual, warm.residual, cold.gap)


@functools.partial(jax.jit, static_argnums=0)
def _cold_and_warm(
    solver: StiefelSolver,
    points: Float[Array, "steps windows m n"],
    grads: Float[Array, "steps windows m n"],
) -> tuple[Steepest, Steepest]:
    start = solver.init(points.shape[1:])

    def follow(dual, given):
        point, grad = given
        answer = solver.solve(Spectral(), point, grad, dual)
        return answer.dual, answer._replace(dual=())

    _, answers = jax.lax.scan(follow, start, (points, grads))
    cold = solver.solve(Spectral(), points[-1], grads[-1], start)._replace(dual=())
    return cold, jax.tree.map(lambda x: x[-1], answers)
