"""Directions for all pairs of sets and norms, against a convex solver in float64."""

import functools
from collections.abc import Callable
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import manifolds
from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds.solvers import BarzilaiBorwein, DouglasRachford, LineMultiplier, Normal
from manifoldmuon.norms import Frobenius, MaxAbs, MaxRowNorm, Norm, RMSToRMS, RootDim, Spectral
from tests.compiled import ask
from tests.manifolds.optima import optimum

EXACT = Spectral(SVD())
LONG = DouglasRachford(steps=60)
Tangent = Callable[[Any], list[Any]]


def sphere(point: np.ndarray) -> Tangent:
    return lambda a: [cp.sum(cp.multiply(point, a)) == 0]


def rows(point: np.ndarray) -> Tangent:
    return lambda a: [cp.sum(cp.multiply(point, a), axis=1) == 0]


def largest(point: np.ndarray) -> Tangent:
    left, _, right = np.linalg.svd(point)
    return lambda a: [left[:, 0] @ a @ right[0] == 0]


def edges(low: float, high: float) -> Callable[[np.ndarray], Tangent]:
    """Constrain descent not to push singular values at an edge further out."""

    def at(point: np.ndarray) -> Tangent:
        left, values, right = np.linalg.svd(point, full_matrices=False)

        def tangent(a: Any) -> list[Any]:
            found = []
            for touching, sign in ((values > high - 1e-4, 1), (values < low + 1e-4, -1)):
                if np.any(touching):
                    inner = left[:, touching].T @ a @ right[touching].T
                    found.append(sign * (inner + inner.T) >> 0)
            return found

        return tangent

    return at


NORMS: dict[str, Norm] = {
    "spectral": EXACT,
    "frobenius": Frobenius(),
    "infinity": MaxAbs(),
    "longest row": MaxRowNorm(threshold=0.0),
}
SETS: dict[str, tuple[Callable[[Norm], manifolds.Manifold], Callable[[np.ndarray], Tangent]]] = {
    "fixed Frobenius": (lambda n: manifolds.Hypersphere(2.0, ndim=2, step_norm=n), sphere),
    "fixed rows": (lambda n: manifolds.EmbeddingRows(1.0, step_norm=n, solver=LONG), rows),
    "spectral sphere": (lambda n: manifolds.SpectralSphere(step_norm=n), largest),
    "ball": (lambda n: manifolds.SpectralBall(step_norm=n, solver=LONG), edges(0, 1)),
    "band": (lambda n: manifolds.SpectralBand(0.7, 1.4, step_norm=n, solver=LONG), edges(0.7, 1.4)),
}


PAIRS = [(kind, norm, (6, 4)) for kind in SETS for norm in NORMS]
PAIRS += [(kind, "spectral", (3, 5)) for kind in SETS]


@pytest.mark.slow_except("fixed rows-spectral-(6, 4)")
@pytest.mark.parametrize(("kind", "norm", "shape"), PAIRS, ids=str)
def test_direction_loss_is_within_gap(kind, norm, shape):
    """The gap is small and bounds the direction's loss against the optimum."""
    make, tangent = SETS[kind]
    manifold = make(NORMS[norm])
    rng = np.random.default_rng([*shape, len(kind), len(norm)])
    with jax.enable_x64(True):
        # Well-separated singular values, some beyond each edge.
        left, _, right = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
        values = np.array([2.5, 1.7, 1.1, 0.3])[: min(shape)]
        if kind == "spectral sphere":  # no corner: a single largest value
            values = values / values[0]
        point = ask(manifold.project, left * values @ right)

        @jax.jit
        def solve(point, grad):
            answer = manifold.steepest(point, grad, manifold.init_dual(point.shape))
            size = manifold.norm.norm(answer.direction)
            return answer, size, manifold.project_tangent(point, -answer.direction)

        for push in (-2.0, 0.0, 2.0):
            grad = rng.standard_normal(shape) + push * point
            answer, size, moved = jax.device_get(solve(point, grad))
            best = optimum(grad, manifold.norm, tangent(point))
            missed = 1 - np.sum(grad * answer.direction) / best
            assert size <= 1 + 1e-9
            np.testing.assert_allclose(moved, -answer.direction, atol=1e-6)
            assert -1e-6 <= missed <= answer.gap + 1e-6
            assert answer.gap <= 0.03


@pytest.mark.slow
def test_two_warm_started_steps_track_training():
    """In a run on the sphere, warm-started gaps are of second order in the rotation per step."""
    manifold = manifolds.Hypersphere(4.0, ndim=2, step_norm=EXACT, solver=LineMultiplier(steps=2))
    rng = np.random.default_rng(0)
    point = ask(manifold.project, np.float32(rng.standard_normal((24, 16))))
    goal = ask(manifold.project, np.float32(rng.standard_normal((24, 16))))
    inputs = jnp.asarray(rng.standard_normal((40, 64, 16)) / np.arange(1, 17), jnp.float32)

    def step(carry, x):
        point, momentum, dual = carry
        momentum = 0.9 * momentum + (x @ (point - goal).T).T @ x
        answer = manifold.steepest(point, momentum, dual)
        point = manifold.retract(point, -0.05 * answer.direction)
        return (point, momentum, answer.dual), answer.gap

    start = point, jnp.zeros_like(point), manifold.init_dual(point.shape)
    (point, _, _), gaps = jax.jit(lambda c: jax.lax.scan(step, c, inputs))(start)
    assert np.median(gaps) <= 3e-3
    assert np.max(gaps) <= 0.02
    assert ask(manifold.distance, point) <= 1e-6


@pytest.mark.slow
def test_custom_tangent_constraint():
    """A solver needs only the projection onto the normal space."""
    grad = np.random.default_rng(1).standard_normal((6, 5)) + 3
    # Column sums are fixed.
    columns = Normal(lambda x: jnp.mean(x, axis=-2, keepdims=True) * jnp.ones_like(x))
    pairs = [(DouglasRachford(steps=200), EXACT), (BarzilaiBorwein(steps=30), RMSToRMS(SVD()))]
    for solver, norm in pairs:
        with jax.enable_x64(True):
            solve = functools.partial(solver.solve, norm, columns, dual=solver.init(grad.shape))
            answer = ask(solve, grad)
        best = optimum(grad, norm, lambda a: [cp.sum(a, axis=0) == 0])
        missed = 1 - np.sum(grad * answer.direction) / best
        assert -1e-6 <= missed <= float(answer.gap) + 1e-9 <= 0.01
        np.testing.assert_allclose(np.sum(answer.direction, axis=0), 0, atol=1e-9)


ANY = {kind: make(EXACT) for kind, (make, _) in SETS.items()} | {
    "sphere": manifolds.Hypersphere(),
    "rows": manifolds.EmbeddingRows(step_norm=MaxRowNorm(RootDim(), threshold=0.0)),
    "orthogonal": manifolds.Orthogonal(),
    "subspace": manifolds.Grassmann(),
}


@pytest.mark.slow_except("fixed rows", "orthogonal", "sphere")
@pytest.mark.parametrize("kind", ANY)
def test_normal_gradient_has_zero_direction(kind):
    """Its tangent part is rounding, which must not become a full step; the gap is 1."""
    manifold, rng = ANY[kind], np.random.default_rng(3)
    drawn = rng.standard_normal((2, 4, 4 if kind == "orthogonal" else 3)).astype(np.float32)
    point, grad = ask(manifold.project, 3 * drawn[0]), drawn[1]
    # For sets with a boundary: a gradient that leaves the set in descent.
    grad = grad - 100 * point if kind in ("ball", "band") else grad
    grad = -(-grad - ask(manifold.project_tangent, point, -grad))
    answer = ask(lambda p, g: manifold.steepest(p, g, manifold.init_dual(p.shape)), point, grad)
    np.testing.assert_array_equal(answer.direction, 0)
    np.testing.assert_array_equal(answer.gap, np.ones_like(answer.gap))


def test_projection_off_the_set_and_at_corners():
    """Projections clip tied singular values together and return to the set."""
    ball, band = manifolds.SpectralBall(2.0), manifolds.SpectralBand(0.5, 2.0)
    point, inside, corner, step = np.asarray(
        [np.diag(x) for x in ([5, 5, 1], [1, 0.5, 0.1], [2, 2, 1], [1, -1, 0.5])], np.float32
    )
    for found, wanted in (
        (ask(ball.project, point), [2, 2, 1]),
        (ask(ball.retract, corner, step), [2, 1, 1.5]),
        (ask(manifolds.SpectralSphere(2.0).project, point), [2, 2, 1]),
        (ask(manifolds.SpectralSphere(2.0).project, inside), [2, 0.5, 0.1]),
        (ask(band.project, point), [2, 2, 1]),
    ):
        np.testing.assert_allclose(found, np.diag(wanted), atol=1e-6)
    np.testing.assert_allclose(ask(ball.distance, point), 1.5, atol=1e-6)
    assert ask(band.distance, ask(band.project, jnp.zeros((4, 3)))) <= 1e-6
