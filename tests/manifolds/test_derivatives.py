"""Derivatives through steps with early-stopping loops or decompositions, by differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import (
    Orthogonal,
    Rotations,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.retractions import SoftCap
from manifoldmuon.manifolds.solvers import DouglasRachford, Resolvents, SkewPolar
from manifoldmuon.norms import FanRatio, Spectral
from tests.instances import MANIFOLDS, ManifoldCase


def with_values(*values: float) -> np.ndarray:
    """Return a 6 x 4 matrix with these singular values."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(k, 4)))[0] for k in (6, 4))
    return left * values @ right.T


# Msign differentiates as the exact polar factor, so the comparison needs the exact factor.
BALL = SpectralBall(solver=DouglasRachford(steps=3), step_norm=Spectral(SVD()))
TURN = np.linalg.qr(np.random.default_rng(2).normal(size=(4, 4)))[0]
CASES = {
    # Lifts to skew matrices, which have pairs of equal singular values.
    "by singular vectors": (Orthogonal(solver=SkewPolar(SVD())), TURN),
    "spectral sphere": (SpectralSphere(), with_values(1, 0.9, 0.5, 0.1)),
    "ball, inside": (BALL, with_values(0.9, 0.6, 0.3, 0.1)),
    "ball, at its boundary": (BALL, with_values(1, 1, 0.6, 0.3)),
    "soft cap": (SpectralBall(retraction=SoftCap(), solver=None), with_values(1, 0.9, 0.5, 0.1)),
    "band, at both edges": (SpectralBand(0.5, 2.0, solver=None), with_values(2, 1.9, 0.5, 0.5)),
}

RESOLVENTS = ManifoldCase("resolvents", Stiefel(solver=Resolvents()), (16, 6))


@pytest.mark.slow_except("band, at both edges")
@pytest.mark.parametrize("name", CASES)
def test_step_gradients_match_differences(name):
    """Differentiate in the step length and the gradient, at rates that leave the set or do not."""
    manifold, point = CASES[name]
    rng = np.random.default_rng(1)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        w = jnp.asarray(point)
        grad, other, weights = (jnp.asarray(rng.normal(size=point.shape)) for _ in range(3))
        dual = manifold.init_dual(point.shape)

        @jax.jit
        def step(x):
            direction = manifold.steepest(w, grad + x[1] * other, dual).direction
            return jnp.sum(weights * manifold.retract(w, -x[0] * direction))

        slopes = jax.jit(jax.grad(step))
        for rate in (0.02, 0.4):
            x, h = jnp.array([rate, 0.3]), 1e-5 * jnp.eye(2)
            differences = [(step(x + e) - step(x - e)) / 2e-5 for e in h]
            np.testing.assert_allclose(slopes(x), differences, rtol=1e-4, atol=2e-5)
            assert np.abs(differences[0]) > 0.05


@pytest.mark.slow_except("embedding rows", "flat vector")
@pytest.mark.parametrize("case", [*MANIFOLDS, RESOLVENTS], ids=lambda case: case.name)
def test_zero_gradient_modes_finite_and_equal(case):
    """At zero the duality map chooses a derivative; it must not be NaN."""
    manifold, keys = case.manifold, jax.random.split(jax.random.key(0), 3)
    point = jax.jit(lambda: manifold.random_point(keys[0], case.shape, jnp.float32))()
    other, weights = (jax.random.normal(k, case.shape) for k in keys[1:])

    def along(grad):
        direction = manifold.steepest(point, grad, manifold.init_dual(case.shape)).direction
        return jnp.sum(weights * direction)

    @jax.jit
    def both(zero):
        return jax.grad(along)(zero), jax.jvp(along, (zero,), (other,))[1]

    backward, forward = both(jnp.zeros(case.shape))
    assert np.isfinite(backward).all()
    np.testing.assert_allclose(jnp.sum(backward * other), forward, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_except("embedding rows", "stiefel column")
@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_retraction_derivative_at_zero_is_step(case):
    """A zero step keeps the point, which must not hide that `retract(p, t v)` starts along v."""
    manifold, keys = case.manifold, jax.random.split(jax.random.key(5), 3)
    with jax.enable_x64(True):
        point = jax.jit(lambda: manifold.random_point(keys[0], case.shape, jnp.float64))()
        vector, weights = (jax.random.normal(k, case.shape, jnp.float64) for k in keys[1:])
        tangent = manifold.project_tangent(point, vector)

        @jax.jit
        def both(rate):
            move = lambda rate: manifold.retract(point, rate * tangent)  # noqa: E731
            forward = jax.jvp(move, (rate,), (jnp.ones(()),))[1]
            return forward, jax.grad(lambda rate: jnp.sum(weights * move(rate)))(rate)

        forward, backward = both(jnp.zeros(()))
    np.testing.assert_allclose(forward, tangent, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(backward, np.vdot(weights, tangent), rtol=1e-6, atol=1e-6)


def test_mirrored_copy_keeps_gradients_of_rotations():
    """A copy that has to be turned into a rotation must not make the others' gradients NaN."""
    weights = np.random.default_rng(6).normal(size=(2, 3, 3))
    tied = jnp.diag(jnp.array([2.0, 2.0, -1.0]))  # the smallest singular value is simple
    project = lambda x: Rotations().project(x)  # noqa: E731
    with jax.enable_x64(True):
        x = jnp.stack([jnp.eye(3), tied]).astype(jnp.float64)
        slope = jax.jit(jax.grad(lambda x: jnp.vdot(weights, project(x))))(x)
        differences = (project(x + 1e-6 * weights) - project(x - 1e-6 * weights)) / 2e-6
    # The derivative at the identity is the projection onto skew matrices.
    np.testing.assert_allclose(slope[0], (weights[0] - weights[0].T) / 2, atol=1e-12)
    np.testing.assert_allclose(np.vdot(slope, weights), np.vdot(weights, differences), rtol=1e-7)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)], ids=str)
@pytest.mark.parametrize(
    ("manifold", "values"),
    [
        (SpectralBall(FanRatio()), (3, 3, 0.3)),
        (SpectralBall(), (0.7, 0.7, 0)),
        (SpectralBand(0.5, 2.0), (3, 0.2, 0.2)),
        (SpectralSphere(2.0), (3, 0.5, 0.5)),
    ],
    ids=lambda x: str(x),
)
def test_projection_derivative_at_ties_matches_differences(manifold, values, shape):
    """Singular vectors jump at a tie; the projection does not."""
    rng = np.random.default_rng(7)
    left, right = (np.linalg.qr(rng.normal(size=(k, 3)))[0] for k in shape)
    tied, change = left * values @ right.T, rng.normal(size=shape)
    with jax.enable_x64(True):
        x, e = jnp.asarray(tied), jnp.asarray(change)
        project = jax.jit(manifold.project)
        forward = jax.jit(lambda x, e: jax.jvp(project, (x,), (e,))[1])(x, e)
        backward = jax.jit(jax.grad(lambda x, e: jnp.vdot(e, project(x))))(x, e)
        differences = (project(x + 1e-6 * e) - project(x - 1e-6 * e)) / 2e-6
    np.testing.assert_allclose(forward, differences, atol=1e-7)
    np.testing.assert_allclose(np.vdot(backward, change), np.vdot(change, forward), rtol=1e-12)


def test_nearest_point_of_ill_conditioned_matrix_turns_with_it():
    """Beyond the condition that `msign` resolves the point comes from singular vectors."""
    rng = np.random.default_rng(8)
    left, right = (np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2))
    x, turn = left * [1, 0.7, 0.4, 1e-9] @ right.T, rng.normal(size=(4, 4))
    turn = turn - turn.T
    given = jnp.asarray(x, jnp.float32), jnp.asarray(turn @ x, jnp.float32)
    point, found = jax.jit(lambda x, e: jax.jvp(Stiefel().project, (x,), (e,)))(*given)
    np.testing.assert_allclose(found, turn @ np.asarray(point), atol=1e-5)
