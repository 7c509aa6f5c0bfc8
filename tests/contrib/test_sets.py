"""`Isospectral` against a convex solver, and edge cases."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from manifoldmuon.contrib import Isospectral
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import Frobenius
from tests.compiled import ask, point_of
from tests.manifolds.optima import optimum

DISTINCT = (3.0, 2.0, 1.0, 0.4)
TIED = (2.0, 1.0, 1.0, 0.0)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def steepest(manifold: Manifold, point, grad):
    return ask(lambda p, g: manifold.steepest(p, g, ()), point, grad)


def inner(x, y) -> float:
    return float(np.sum(np.float64(x) * np.float64(y)))


def rotated(point):
    """Constrain `A = X W + W Y` with skew X and Y: the definition, without singular vectors."""

    # Rounding separates equal singular values slightly, which huge rotations would exploit.
    u, values, vh = np.linalg.svd(point, full_matrices=False)
    point = (u * np.round(values, 5)) @ vh

    def constraints(a):
        left, right = (cp.Variable((k, k)) for k in point.shape)
        bounded = [cp.norm(x, "fro") <= 100 for x in (left, right)]
        skew = [x + x.T == 0 for x in (left, right)]
        return [*bounded, *skew, a == left @ point + point @ right]

    return constraints


CASES = [
    (Isospectral((1.5,) * 4), (4, 4), rotated, 1e-4),
    (Isospectral(DISTINCT), (7, 4), rotated, 0.3),
    (Isospectral(TIED), (4, 6), rotated, 0.3),
    (Isospectral(TIED, step_norm=Frobenius()), (6, 4), rotated, 1e-5),
]


@pytest.mark.parametrize(
    ("manifold", "shape", "constraints", "loss"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_directions_match_convex_solver_within_gap(manifold, shape, constraints, loss):
    """The loss in objective is at most the reported gap and at most the documented loss."""
    w, g = point_of(manifold, shape), normal(3, *shape)
    answer = steepest(manifold, w, g)
    best = optimum(g, manifold.norm, constraints(np.float64(w)))
    lost = 1 - inner(g, answer.direction) / best
    assert -1e-5 < lost <= min(float(answer.gap) + 1e-6, loss)
    assert float(answer.gap) <= 2 * loss


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize("values", [DISTINCT, TIED, (1.0,) * 4], ids=str)
def test_tangent_projection_matches_skew_basis(values, shape):
    """All skew pairs give a basis of the tangent space."""
    with jax.enable_x64(True):
        manifold = Isospectral(values)
        w = point_of(manifold, shape, 1, jnp.float64)
        v = np.random.default_rng(0).normal(size=shape)
        rows = []
        for k, side in enumerate(shape):
            for i in range(side):
                for j in range(i):
                    turn = np.zeros((side, side))
                    turn[i, j], turn[j, i] = 1, -1
                    rows.append((turn @ w if k == 0 else w @ turn).ravel())
        basis = scipy.linalg.orth(np.stack(rows, axis=1))
        expected = (basis @ (basis.T @ v.ravel())).reshape(shape)
        np.testing.assert_allclose(ask(manifold.project_tangent, w, v), expected, atol=1e-12)


def test_set_of_singular_values_contains_the_matrix():
    w = normal(0, 3, 5)
    manifold = Isospectral(tuple(np.linalg.svd(w, compute_uv=False).tolist()))
    np.testing.assert_allclose(ask(manifold.project, w), w, atol=2e-6)
    assert ask(manifold.distance, w) < 1e-6
    assert ask(manifold.distance, 1.01 * w) == pytest.approx(0.01, rel=1e-3)


def test_normal_gradient_has_no_direction_and_gap_one():
    """Rounding errors must not become a full step."""
    manifold = Isospectral((2.0, 1.0, 0.5))
    w = point_of(manifold, (5, 3))
    answer = steepest(manifold, w, w @ (w.T @ w))
    np.testing.assert_array_equal(answer.direction, 0)
    assert answer.gap == 1


def test_single_point_has_zero_direction():
    manifold = Isospectral((2.0,))
    answer = steepest(manifold, point_of(manifold, (1, 1)), normal(0, 1, 1))
    np.testing.assert_array_equal(answer.direction, 0)
    assert answer.gap == 0
