"""The multipliers of a normal space, by descent of the dual."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.manifolds.solvers import _solver
from manifoldmuon.manifolds.solvers._multipliers import certified, repeat, shortened, without_normal
from manifoldmuon.norms import Norm


class Descent(NamedTuple):
    """The next multiplier; the last multiplier, its duality map, and the normal part of the map."""

    dual: _solver.Multiplier
    before: arrays.Floats
    direction: arrays.Floats
    residual: arrays.Floats


@dataclasses.dataclass(frozen=True)
class BarzilaiBorwein(_solver.WarmSolver):
    """Solver for a linear tangent space: dual descent with step lengths by Barzilai and Borwein.

    The dual's gradient in the normal part T is the normal part R of `dualize(G + T)`. The step
    length `<dT, dR> / <dR, dR>` from the last two pairs (IMA J. Numer. Anal. 8, 1988) needs no
    constant. The last duality map is made tangent and, if this takes it above norm 1, shortened.
    Use it with a smooth duality map, such as `Spectral(TRAINING_MSIGN)`: at a kink of the dual it
    stalls.

    Attributes:
      steps: the number of duality maps per direction; three keep up with training. With a single
        map per gradient the multiplier lags behind.
      cold_start_steps: the number of further maps at a cold start.

    Examples:
      >>> norm = mm.norms.Spectral(mm.linalg.TRAINING_MSIGN)
      >>> rows = mm.manifolds.EmbeddingRows(1.0, step_norm=norm, solver=BarzilaiBorwein(steps=3))
    """

    steps: int = 3
    cold_start_steps: int = 9

    def __post_init__(self):
        check_fields(self, steps="[1, inf)", cold_start_steps="[0, inf)")

    def solve(
        self, norm: Norm, at: _solver.Normal, grad: arrays.Floats, dual: _solver.Multiplier
    ) -> _solver.Steepest:
        ndim = norm.ndim
        problem = without_normal(grad, at, ndim)

        def inner(x, y):
            return arrays.inner_product(x, y, ndim)

        def descend(descent: Descent) -> Descent:
            (shift, step), before, _, residual_before = descent
            reduced = problem.tangent + shift
            direction = norm.dualize(reduced)
            residual = at.project(direction)
            change, turned = shift - before, residual - residual_before
            curved = inner(change, turned)
            length = inner(reduced, direction) / arrays.nonzero_or_one(inner(direction, direction))
            step = jnp.where(step > 0, step, length)
            ratio = curved / arrays.nonzero_or_one(inner(turned, turned))
            step = jnp.where(curved > 0, ratio, step)
            after = _solver.Multiplier(shift - arrays.expand_trailing(step, ndim) * residual, step)
            return Descent(after, shift, direction, residual)

        start = _solver.Multiplier(*(x.astype(problem.noise.dtype) for x in dual))
        start = start._replace(shift=at.project(at.embed(start.shift)))  # the point has moved since
        nothing = jnp.zeros_like(problem.tangent)
        descent = Descent(start, start.shift, nothing, nothing)
        descent = match_varying_axes(descent, at.project(problem.tangent))
        descent = repeat(descend, descent, self.steps, self.cold_start_steps, start.step > 0)
        direction = descent.direction - descent.residual
        direction = shortened(norm, direction, descent.residual)
        reduced = problem.tangent + descent.before
        shift, step = descent.dual
        after = _solver.in_dtypes_of(dual, _solver.Multiplier(at.coordinates(shift), step))
        residual = arrays.frobenius_norm(descent.residual, ndim)
        return certified(
            norm, problem, problem.tangent, reduced, descent.direction, direction, after, residual
        )
