"""Gaps of a Stiefel solver's directions along a training run."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.manifolds.solvers import Steepest, StiefelSolver
from manifoldmuon.norms import Spectral
from studies.stiefel_problems import stiefel_errors


class SolverGaps(NamedTuple):
    """Gaps of a solver's directions, by window.

    Attributes:
      cold: the gap to the optimum from a cold start.
      warm: the gap from a warm start, with the dual variables of the previous steps.
      residual_cold: the distance of the raw direction from the tangent space, cold start.
      residual_warm: the distance of the raw direction from the tangent space, warm start.
      reported_cold: the gap that the solver reports, cold start.
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
    """Measure the gap at the last step of each window, from a cold and a warm start.

    Gaps are relative to the optimum, computed in float64 and independently of the solver, after
    the direction is made feasible.

    Args:
      solver: the solver.
      points: points on the Stiefel manifold of scale 1, `m >= n`, at consecutive steps.
      grads: the gradients (or momenta) at the points.
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
