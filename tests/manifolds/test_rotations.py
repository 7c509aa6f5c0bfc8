"""`Rotations`: the nearest rotation by an SVD; reflections are far from the set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Rotations
from manifoldmuon.minimize import minimize
from tests.compiled import ask


def test_nearest_rotation_matches_svd():
    given = np.random.default_rng(2).standard_normal((6, 3, 3))
    assert {-1.0, 1.0} == set(np.sign(np.linalg.det(given)))
    left, _, right = np.linalg.svd(given)
    left[:, :, 2] *= np.linalg.det(left @ right)[:, None]
    with jax.enable_x64(True):
        found = ask(Rotations().project, given)
    np.testing.assert_allclose(found, left @ right, atol=1e-13)


def test_reflection_has_distance_two():
    mirror = jnp.diag(jnp.array([1.0, 1.0, -1.0]))
    distances = ask(Rotations().distance, jnp.stack([mirror, jnp.eye(3)]))
    np.testing.assert_array_equal(distances, [2, 0])


@pytest.mark.slow
def test_minimize_returns_rotation_not_reflection():
    """Align points with their mirror image (Wahba's problem)."""
    points = np.random.default_rng(5).standard_normal((9, 3))
    target = points * np.array([1.0, 1.0, -1.0])
    with jax.enable_x64(True):
        turn, nearest = ask(Rotations().project, np.stack([points[:3], points.T @ target]))
        found = minimize(lambda x: jnp.sum((points @ x - target) ** 2), Rotations(), turn)
    np.testing.assert_allclose(np.linalg.det(found.point), 1, atol=1e-12)
    np.testing.assert_allclose(found.point, nearest, atol=1e-8)
