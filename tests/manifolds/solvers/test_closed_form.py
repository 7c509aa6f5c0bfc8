"""The theorem of the default solver, and its known special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds.solvers import SkewPolar
from manifoldmuon.norms import Spectral
from tests.manifolds.solvers.reference import dual_value
from tests.oracles import stiefel_problems
from tests.tolerances import rounding


def lifted(point, grad):
    """Return `msign(G W^T - W G^T) W`, by an SVD in float64."""
    u, s, vt = np.linalg.svd(grad @ point.T - point @ grad.T)
    rank = (s > 1e-12 * s[0]).sum()
    return u[:, :rank] @ vt[:rank] @ point


@pytest.mark.parametrize("shape", [(36, 12), (24, 12), (16, 12), (13, 12), (12, 12)])
@pytest.mark.parametrize("family", stiefel_problems.STIEFEL_FAMILIES)
def test_closed_form_attains_the_dual_optimum(family, shape):
    point, grad = stiefel_problems.stiefel_problem(family, *shape)
    direction = lifted(point, grad)
    errors = stiefel_problems.stiefel_errors(point, grad, direction)
    assert errors.residual < 1e-12
    assert errors.norm < 1 + 1e-12
    value = (grad * direction).sum()
    assert value == pytest.approx(stiefel_problems.stiefel_optimum(point, grad), rel=1e-12)
    # Weak duality: no feasible direction exceeds any dual value, so equality proves both.
    assert value == pytest.approx(dual_value(point, grad), rel=2e-5)


@jax.jit
def _solve(point, grad):
    return SkewPolar().solve(Spectral(), point, grad, ())


def solve(point, grad):
    return _solve(jnp.float32(point), jnp.float32(grad))


def test_square_points_match_orthogonal_formula():
    rng = np.random.default_rng(0)
    point, grad = stiefel_problems.orthonormal(rng, 12, 12), rng.standard_normal((12, 12))
    u, s, vt = np.linalg.svd(point.T @ grad - grad.T @ point)
    close = rounding(6, 12, condition=s[0] / s[-1])  # products: four in a step, two outside
    np.testing.assert_allclose(solve(point, grad).direction, point @ u @ vt, atol=close)
    assert close < 1e-3


def test_single_column_gives_normalised_tangent_part():
    rng = np.random.default_rng(0)
    point, grad = stiefel_problems.orthonormal(rng, 3, 1), rng.standard_normal((3, 1))
    tangent = grad - point * (point.T @ grad)
    expected = tangent / np.linalg.norm(tangent)
    np.testing.assert_allclose(solve(point, grad).direction, expected, atol=2e-5)


def test_direction_is_equivariant():
    # For orthogonal P and Q, the direction for P W Q and P G Q is P A Q.
    rng = np.random.default_rng(0)
    point, grad = stiefel_problems.stiefel_problem("gaussian", 30, 8)
    left, right = stiefel_problems.orthonormal(rng, 30, 30), stiefel_problems.orthonormal(rng, 8, 8)
    turned = solve(left @ point @ right, left @ grad @ right).direction
    np.testing.assert_allclose(turned, left @ solve(point, grad).direction @ right, atol=2e-5)
