"""The solvers of the shoot-out, and what each of them is worth along a training run."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from manifoldmuon.lab._trajectory import Given
from manifoldmuon.linalg import DEFAULT_MSIGN, msign, sym
from manifoldmuon.manifolds import Steepest
from manifoldmuon.manifolds.solvers import (
    ACCURATE,
    ADMM,
    FAST,
    AlternatingProjection,
    DualAscent,
    FixedPoint,
    StiefelSolver,
)
from manifoldmuon.manifolds.solvers._worth import stiefel_worth


@dataclasses.dataclass(frozen=True)
class NoProjection(StiefelSolver):
    """`msign(G)`: the unconstrained direction, not tangent; the retraction alone keeps the set.

    The negative control. Its residual is honest, its gap is not known to it (NaN).
    """

    def init_dual(self, shape: tuple[int, ...]) -> tuple[()]:
        del shape
        return ()

    def solve(
        self,
        point: Float[Array, "*batch m n"],
        grad: Float[Array, "*batch m n"],
        dual: chex.ArrayTree,
    ) -> Steepest:
        direction = msign(grad, DEFAULT_MSIGN)
        along = 2 * sym(point.mT @ direction)
        residual = jnp.sqrt(jnp.sum(along**2, axis=(-2, -1))) / max(point.shape[-1], 1)
        return Steepest(direction, dual, residual, jnp.full_like(residual, jnp.nan))


SOLVERS: dict[str, StiefelSolver] = {
    "exact": ACCURATE,
    "one step": FAST,
    "alternating, 10": AlternatingProjection(steps=10),
    "dual ascent, 10": DualAscent(steps=10),
    "dual ascent, 100": DualAscent(steps=100),
    "fixed point, 3": FixedPoint(steps=3),
    "fixed point, 20": FixedPoint(steps=20),
    "ADMM, 3": ADMM(steps=3),
    "ADMM, 30": ADMM(steps=30),
    "no projection": NoProjection(),
}
"""By name and number of iterations."""


def gaps(solver: StiefelSolver, windows: Sequence[Sequence[Given]]) -> dict[str, Any]:
    """The gap of the last problem of each window, cold and after all that went before it.

    Args:
      solver: which.
      windows: consecutive steps of one layer, all windows of one length.

    Returns:
      One number per window: true gaps `cold` and `warm`, the tangent `residual_cold` and
      `residual_warm` of the solver's raw direction, and `reported_cold`, the gap that the
      solver gives itself. Gaps are those of the direction once it is made feasible, in float64.
    """
    points = jnp.asarray(np.stack([[given.point for given in w] for w in windows], axis=1))
    grads = jnp.asarray(np.stack([[given.gradient for given in w] for w in windows], axis=1))
    cold, warm = _cold_and_warm(solver, points, grads)
    worth = {
        name: [
            stiefel_worth(window[-1].point, window[-1].gradient, direction)
            for window, direction in zip(windows, np.asarray(answer.direction), strict=True)
        ]
        for name, answer in (("cold", cold), ("warm", warm))
    }
    return {
        **{name: [max(w.gap, 0.0) for w in found] for name, found in worth.items()},
        "residual_cold": cold.residual,
        "residual_warm": warm.residual,
        "reported_cold": cold.gap,
    }


@functools.partial(jax.jit, static_argnums=0)
def _cold_and_warm(
    solver: StiefelSolver,
    points: Float[Array, "steps windows m n"],
    grads: Float[Array, "steps windows m n"],
) -> tuple[Steepest, Steepest]:
    start = solver.init_dual(points.shape[1:])

    def follow(dual, given):
        point, grad = given
        answer = solver.solve(point, grad, dual)
        return answer.dual, answer._replace(dual=())

    _, answers = jax.lax.scan(follow, start, (points, grads))
    cold = solver.solve(points[-1], grads[-1], start)._replace(dual=())
    return cold, jax.tree.map(lambda x: x[-1], answers)
