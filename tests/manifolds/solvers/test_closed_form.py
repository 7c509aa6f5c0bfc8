"""The theorem of the default solver, and its known special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds.solvers import SkewPolar
from manifoldmuon.norms import Spectral
from tests.oracles.stiefel_problems import (
    STIEFEL_FAMILIES,
    orthonormal,
    stiefel_errors,
    stiefel_optimum,
    stiefel_problem,
)
from tests.tolerances import rounding


def dual_value(point, grad) -> float:
    """Minimise `||G + 2 W L||_*` over symmetric L, by reweighted least squares from zero."""
    dual, smoothing, best = np.zeros((point.shape[1],) * 2), 0.1, np.inf
    for _ in range(400):
        moved = grad + 2 * point @ dual
        values, basis = np.linalg.eigh(moved.T @ moved)
        best = min(best, np.sqrt(np.maximum(values, 0)).sum())
        weights = 1 / np.sqrt(np.maximum(values, 0) + smoothing**2)
        inner = basis.T @ (point.T @ grad) @ basis
        right = -(inner * weights + weights[:, None] * inner.T) / 2
        target = basis @ (right / (weights[:, None] + weights)) @ basis.T
        dual = dual + 1.7 * (target - dual)
        smoothing = max(0.9 * smoothing, 1e-6)
    return best


def lifted(point, grad):
    """Return `msign(G W^T - W G^T) W`, by an SVD in float64."""
    u, s, vt = np.linalg.svd(grad @ point.T - point @ grad.T)
    rank = (s > 1e-12 * s[0]).sum()
    return u[:, :rank] @ vt[:rank] @ point


@pytest.mark.parametrize("shape", [(36, 12), (24, 12), (16, 12), (13, 12), (12, 12)])
@pytest.mark.parametrize("family", STIEFEL_FAMILIES)
def test_closed_form_attains_the_dual_optimum(family, shape):
    point, grad = stiefel_problem(family, *shape)
    direction = lifted(point, grad)
    errors = stiefel_errors(point, grad, direction)
    assert errors.residual < 1e-12
    assert errors.norm < 1 + 1e-12
    value = (grad * direction).sum()
    assert value == pytest.approx(stiefel_optimum(point, grad), rel=1e-12)
    # Weak duality: no feasible direction exceeds any dual value, so equality proves both.
    assert value == pytest.approx(dual_value(point, grad), rel=2e-5)


@jax.jit
def solve(point, grad):
    point, grad = jnp.float32(point), jnp.float32(grad)
    return SkewPolar().solve(Spectral(), point, grad, ()).direction


def test_square_points_match_orthogonal_formula():
    rng = np.random.default_rng(0)
    point, grad = orthonormal(rng, 12, 12), rng.standard_normal((12, 12))
    u, s, vt = np.linalg.svd(point.T @ grad - grad.T @ point)
    close = rounding(6, 12, condition=s[0] / s[-1])  # products: four in a step, two outside
    np.testing.assert_allclose(solve(point, grad), point @ u @ vt, atol=close)
    assert close < 1e-3


def test_single_column_gives_normalised_tangent_part():
    rng = np.random.default_rng(0)
    point, grad = orthonormal(rng, 3, 1), rng.standard_normal((3, 1))
    tangent = grad - point * (point.T @ grad)
    np.testing.assert_allclose(solve(point, grad), tangent / np.linalg.norm(tangent), atol=2e-5)


def test_direction_is_equivariant():
    # For orthogonal P and Q, the direction for P W Q and P G Q is P A Q.
    rng = np.random.default_rng(0)
    point, grad = stiefel_problem("gaussian", 30, 8)
    left, right = orthonormal(rng, 30, 30), orthonormal(rng, 8, 8)
    turned = solve(left @ point @ right, left @ grad @ right)
    np.testing.assert_allclose(turned, left @ solve(point, grad) @ right, atol=2e-5)
