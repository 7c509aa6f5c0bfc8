"""`Rotations`: laws, the nearest rotation by an SVD, and the determinant along steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Rotations, retractions
from manifoldmuon.minimize import minimize
from manifoldmuon.optim import init_tree
from manifoldmuon.testing import check_manifold, check_slopes


@pytest.mark.slow_except("one matrix")
@pytest.mark.parametrize(
    ("manifold", "shape"),
    [(Rotations(), (3, 3)), (Rotations(2.0), (2, 4, 4))],
    ids=["one matrix", "a stack of scale 2"],
)
def test_rotations_satisfy_manifold_laws(manifold, shape):
    check_manifold(manifold, shape, jax.random.key(0), thorough=False)


@pytest.mark.slow
def test_retraction_slope():
    check_slopes(Rotations(), (3, 3), jax.random.key(1), order=2)


def test_nearest_rotation_matches_svd():
    given = np.random.default_rng(2).standard_normal((6, 3, 3))
    assert {-1.0, 1.0} == set(np.sign(np.linalg.det(given)))
    left, _, right = np.linalg.svd(given)
    left[:, :, 2] *= np.linalg.det(left @ right)[:, None]
    with jax.enable_x64(True):
        found = Rotations().project(jnp.asarray(given))
    np.testing.assert_allclose(found, left @ right, atol=1e-13)


@pytest.mark.parametrize(
    "retraction",
    [retractions.Polar(), retractions.QR(), retractions.Cayley()],
    ids=lambda r: type(r).__name__,
)
def test_long_steps_keep_the_determinant(retraction):
    manifold = Rotations(retraction=retraction)
    point = manifold.random_point(jax.random.key(3), (32, 4, 4), jnp.float32)
    np.testing.assert_allclose(np.linalg.det(point), 1, atol=1e-5)
    step = jax.random.normal(jax.random.key(4), point.shape)
    moved = jax.jit(manifold.retract)(point, 3 * manifold.project_tangent(point, step))
    np.testing.assert_allclose(np.linalg.det(moved), 1, atol=1e-4)


def test_reflection_has_distance_two():
    mirror = jnp.diag(jnp.array([1.0, 1.0, -1.0]))
    assert float(Rotations().distance(mirror)) == 2
    assert float(Rotations().distance(jnp.eye(3))) == 0


def test_minimize_returns_rotation_not_reflection():
    """Align points with their mirror image (Wahba's problem)."""
    points = np.random.default_rng(5).standard_normal((9, 3))
    target = points * np.array([1.0, 1.0, -1.0])
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct((3, 3), jnp.float64)
        start = init_tree(Rotations(), jax.random.key(6), shape)
        found = minimize(lambda x: jnp.sum((points @ x - target) ** 2), Rotations(), start)
        nearest = Rotations().project(jnp.asarray(points.T @ target))
    np.testing.assert_allclose(np.linalg.det(found.point), 1, atol=1e-12)
    np.testing.assert_allclose(found.point, nearest, atol=1e-8)
