"""Check steepest directions: feasible, ascending, and within their gap of the optimum."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from manifoldmuon.manifolds import Manifold
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.testing._assertions import SCALES, at_most, same_tree_of_shapes, wide
from manifoldmuon.testing._checked_manifold import (
    Answers,
    CheckedManifold,
    Values,
    jitted,
    max_size,
)

NEARLY_NORMAL = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # shares that are not normal


def check_steepest(case: CheckedManifold) -> None:
    answers = _check_direction(case, case.point, case.grad, "", slack=0.0)
    compete = jitted(functools.partial(_competitor, case.manifold))
    edge = case.project(3 * case.other)
    for point in (case.point, edge) if case.manifold.has_boundary else (case.point,):
        found = case.ask(point, case.grad, case.vector)
        _check_gap_bound(case, point, case.grad, found, compete(point, case.grad))
    check_stays_near("direction", case, answers.direction)
    at_most("residual >= 0", 0, answers.residual)
    at_most("gap >= 0", 0, answers.gap)
    at_most(f"gap <= {case.gap}", answers.gap, case.gap)


def check_scale_invariance(case: CheckedManifold) -> None:
    first = case.ask(case.point, case.grad, case.vector)
    for c in SCALES:
        scaled = case.ask(case.point, c * case.grad, case.vector)
        law = f"steepest(p, c g) == steepest(p, g) at c = {c:g}"
        case.agree(law, scaled.direction, first.direction)
        case.agree(f"{law} (gap)", scaled.gap, first.gap)


def check_nearly_normal(case: CheckedManifold) -> None:
    """Check gradients that are normal, up to their sign and a small share.

    Rounding of the normal part may turn the direction against such a gradient.
    """
    for outside, vector in itertools.permutations((case.vector, case.other, case.grad), 2):
        point = case.project(3 * outside)  # on the boundary, if any
        normal = vector + case.project_tangent(point, -vector)
        size, length = (float(np.linalg.norm(wide(x))) for x in (normal, vector))
        if size <= 10 * case.tolerance * length:  # no normal part
            continue
        for share in NEARLY_NORMAL:
            for sign in (1, -1):
                grad = sign * length / size * normal + share * outside
                grad = grad.astype(case.grad.dtype)
                _check_direction(case, point, grad, ", nearly normal", case.tolerance)


def check_warm(case: CheckedManifold) -> None:
    """Check a warm start from another problem's dual: a feasible direction and a true gap."""
    start = case.ask(case.point, 1e3 * case.other, case.vector).dual
    if not jax.tree.leaves(start):
        return
    answer = jitted(case.manifold.steepest)(case.point, case.grad, start)
    same_tree_of_shapes("the dual keeps its structure", answer.dual, start)
    size = case.norm(answer.direction)
    at_most("norm(direction) <= 1, from another dual", size, 1 + case.overshoot)
    back = -case.project_tangent(case.point, -answer.direction)
    case.agree("direction is tangent, from another dual", back, answer.direction)
    _check_gap_bound(case, case.point, case.grad, answer)


def check_stays_near(law: str, case: CheckedManifold, vector: Values) -> None:
    """Check that a tangent vector of norm 1 leaves the set like t**2 / 2, not like t.

    The check is independent of how the tangent space is computed.
    """
    t = 0.03
    away = case.distance(case.point + t * case.unit(vector))
    at_most(f"{law}: the set is left to second order only", away, t**2)


def _check_direction(
    case: CheckedManifold, point: Values, grad: Values, where: str, slack: float
) -> Answers:
    answers = case.ask(point, grad, case.vector)
    direction = answers.direction
    at_most(f"norm(direction) <= 1{where}", answers.direction_size, 1 + case.overshoot)
    back = -case.project_tangent(point, -direction)
    case.agree(f"direction is tangent{where}", back, direction)
    slack *= float(np.linalg.norm(wide(grad)) * np.linalg.norm(wide(direction)))
    at_most(f"direction ascends{where}", 0, case.inner(grad, direction), slack)
    _check_gap_bound(case, point, grad, answers)
    return answers


def _competitor(manifold: Manifold, point: Array, grad: Array, steps: int = 30) -> Array:
    """Return a feasible direction that gains almost as much as the steepest.

    Subgradient steps with Polyak's step length minimise `dual_norm(grad - N)` over normal vectors
    N; the mean of the subgradients becomes tangent. They use only the manifold's projection and
    norm. Thirty steps come within 1 % of the optimum on most sets.
    """
    norm, axes = manifold.norm, tuple(range(-manifold.ndim, 0))

    def gain(x, y):
        return jnp.sum(x * y, axis=axes, keepdims=True)

    def tangent(vector):
        return -manifold.project_tangent(point, -vector)

    def feasible(vector):
        vector = tangent(vector)
        return vector / jnp.expand_dims(jnp.maximum(norm.norm(vector), 1e-30), axes)

    def step(_, carry):
        normal, mean, best = carry
        direction = norm.dualize(grad - normal)
        missed = jnp.maximum(gain(grad - normal, direction) - gain(grad, best), 0)
        outside = direction - tangent(direction)
        length = missed / jnp.maximum(gain(outside, outside), 1e-30)
        normal, mean = normal + length * direction, mean + length * direction
        for other in (feasible(direction), feasible(mean)):
            best = jnp.where(gain(grad, other) > gain(grad, best), other, best)
        return normal - tangent(normal), mean, best

    zero = jnp.zeros_like(grad)
    return jax.lax.fori_loop(0, steps, step, (zero, zero, feasible(grad)))[2]


def _check_gap_bound(
    case: CheckedManifold, point: Values, grad: Values, answers: Answers | Steepest, *rivals: Values
) -> None:
    """Check that no feasible direction beats the bound implied by the gap."""
    value, direction = case.inner(grad, answers.direction), answers.direction
    left = 1 - np.max(wide(answers.gap), initial=0)
    length = float(np.sqrt(case.inner(grad, grad)))
    best = [0.0 if case.optimum is None else case.optimum(point, grad)]
    for rival in (
        direction,
        case.vector,
        case.other,
        grad,
        case.grad,
        grad + case.vector,
        direction + 0.1 * case.vector,
        direction + 0.1 * grad,
        *rivals,
    ):
        # The signs: at a boundary a descent step must not leave the set. A tangent part may be
        # rounding alone, which a second projection removes.
        rival = case.unit(-case.project_tangent(point, -rival))
        again = -case.project_tangent(point, -rival)
        if (size := max_size(case.norm(again))) > 0.1:
            best.append(case.inner(grad, again) / max(size, 1))
    at_most("the gap is a true bound", left * max(best), value, case.tolerance * length)
