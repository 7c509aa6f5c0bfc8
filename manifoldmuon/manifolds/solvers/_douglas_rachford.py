"""Multipliers for any set, also with boundary, by alternating projections."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from manifoldmuon._internal.arguments import check_fields
from manifoldmuon._internal.matrices.arrays import (
    Floats,
    Numbers,
    expand_trailing,
    frobenius_norm,
    inner_product,
    nonzero_or_one,
)
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon.manifolds.solvers._multipliers import (
    TangentGradient,
    certified,
    shortened,
    without_normal,
)
from manifoldmuon.manifolds.solvers._solver import Normal, Solver, Steepest
from manifoldmuon.norms import Norm

# How far the projections may disagree, in units of the problem's mean curvature. By trial: from 1
# to 10 the gaps of Gaussian gradients stay below 1e-2.
_PENALTY = 3.0
_RELAXATION = 1.6  # within the 1.5 to 1.8 of Boyd et al. (2011), section 3.4.3
_START = 100  # parts below the mean by more than this factor start short of norm 1


@dataclasses.dataclass(frozen=True)
class DouglasRachford(Solver):
    """Solver for any set, also with boundary, and any norm with a projection.

    Alternates two projections: onto the ball of the norm (`Norm.project`), pushed along the
    gradient, and onto the tangent space or cone. The parts removed by the second projection add up
    to the multiplier (Lions and Mercier, SIAM J. Numer. Anal. 16, 1979; as ADMM in Boyd et al.
    2011). Needs no warm start. The norm's projection must be exact: with the four steps of
    `Spectral(TRAINING_MSIGN)` a few pairs miss most of the optimum, and the gap shows it.

    Attributes:
      steps: the number of pairs of projections.
    """

    steps: int = 12

    def __post_init__(self):
        check_fields(self, steps="[1, inf)")

    def solve(self, norm: Norm, at: Normal, grad: Floats, dual: tuple[()] = ()) -> Steepest:
        normal, cone = at.project, at.cone
        if cone and norm.is_euclidean:
            return _euclidean_on_cone(norm, at, grad)
        ndim = norm.ndim
        problem = _on_cone(grad, at, ndim) if cone else without_normal(grad, at, ndim)
        whole = problem.whole if cone else problem.tangent
        free = norm.dualize(problem.tangent)
        length = inner_product(problem.tangent, free, ndim)
        unit = length / nonzero_or_one(inner_product(free, free, ndim))
        unit = nonzero_or_one(expand_trailing(unit, ndim))
        push = whole / (_PENALTY * unit)
        # Not `free`, which takes full steps along a normal part left by rounding.
        first = norm.project(_START / unit * problem.tangent)

        def step(_, state):
            tangent, multiplier, _ = state
            inside = norm.project(tangent - multiplier + push)
            target = _RELAXATION * inside + (1 - _RELAXATION) * tangent + multiplier
            multiplier = normal(target)
            return target - multiplier, multiplier, inside

        start = match_varying_axes((first - normal(first), normal(push), first))
        direction, multiplier, inside = jax.lax.fori_loop(0, self.steps, step, start)
        if cone:  # rounding of a large multiplier is not tangent
            direction = direction - normal(direction)
        direction = shortened(norm, direction, direction - inside)
        if cone:
            direction, hidden = _ascent_direction(norm, at, problem, direction)
            problem = problem._replace(still=problem.still | hidden)
        reduced = (push - multiplier) * _PENALTY * unit
        attained = norm.dualize(reduced)
        residual = frobenius_norm(normal(attained), ndim)
        return certified(norm, problem, whole, reduced, attained, direction, (), residual)


def _euclidean_on_cone(norm: Norm, normal: Normal, grad: Floats) -> Steepest:
    """Return the tangent part of the gradient at norm 1, with a gap that includes rounding."""
    problem = _on_cone(grad, normal, norm.ndim)
    direction = _tangent_part(norm, normal, problem)
    still = problem.still | (_guaranteed_gain(problem, direction, norm.ndim) <= 0)
    problem, attained = problem._replace(still=still), norm.dualize(problem.tangent)
    residual = frobenius_norm(attained - direction, norm.ndim)
    return certified(
        norm, problem, problem.whole, problem.tangent, attained, direction, (), residual
    )


def _on_cone(grad: Floats, normal: Normal, ndim: int) -> TangentGradient:
    """Return `without_normal` with the rounding errors of a projection onto a cone.

    Projecting onto a cone takes a sign and some products more than onto a space. Rounding of the
    final direction may also lead inside, against all of the normal part.
    """
    problem = without_normal(grad, normal, ndim)
    lost = jnp.finfo(grad.dtype).eps / 2 * frobenius_norm(problem.whole, ndim)
    return problem._replace(noise=jnp.maximum(4 * problem.noise, lost))


def _tangent_part(norm: Norm, normal: Normal, problem: TangentGradient) -> Floats:
    """Return the tangent part of the gradient at norm 1, orthogonal to the normal part.

    Moves inside a cone are feasible, so projecting again does not remove rounding errors along the
    normal part. The projection is orthogonal to it in exact arithmetic (Moreau).
    """
    ndim = norm.ndim
    away = problem.whole - problem.tangent
    # Adding 1, the length of the tangent part, keeps the correction small for a short normal part.
    length = 1 + inner_product(away, away, ndim)
    normal_part = away * expand_trailing(inner_product(away, problem.tangent, ndim) / length, ndim)
    # Zero in exact arithmetic, and so is its derivative.
    tangent = problem.tangent - jax.lax.stop_gradient(normal_part)
    tangent = tangent - normal.project(tangent)
    return tangent / nonzero_or_one(expand_trailing(norm.bound(tangent), ndim))


def _guaranteed_gain(problem: TangentGradient, direction: Floats, ndim: int) -> Numbers:
    noise = problem.noise * frobenius_norm(direction, ndim)
    return inner_product(problem.whole, direction, ndim) - noise


def _ascent_direction(
    norm: Norm, normal: Normal, problem: TangentGradient, direction: Floats
) -> tuple[Floats, Bool[Array, "*batch"]]:
    """Return the direction, or the tangent part if that surely gains more; and where neither gains.

    A direction within a cone may descend along the normal part of a gradient, which is huge
    compared with a small tangent part: there rounding must not decide.
    """
    plain = _tangent_part(norm, normal, problem)
    first, second = (_guaranteed_gain(problem, x, norm.ndim) for x in (direction, plain))
    chosen = jnp.where(expand_trailing(second > first, norm.ndim), plain, direction)
    return chosen, jnp.maximum(first, second) <= 0
