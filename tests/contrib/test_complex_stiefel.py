"""`ComplexStiefel` against a convex solver and NumPy's complex arithmetic."""

from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.contrib import ComplexStiefel
from manifoldmuon.manifolds import retractions
from manifoldmuon.minimize import Reason, minimize
from manifoldmuon.testing import check_manifold, check_norm, check_slopes

to_complex, from_complex = ComplexStiefel.to_complex, ComplexStiefel.from_complex


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def adjoint(x):
    return np.swapaxes(np.conj(x), -1, -2)


def polar(x):
    left, _, right = np.linalg.svd(x, full_matrices=False)
    return left @ right


def best(point, grad):
    """Compute the optimum with a convex solver over complex variables."""
    w, g = (x[0].astype(np.float64) + 1j * x[1] for x in (point, grad))
    a = cp.Variable(w.shape, complex=True)
    inner = adjoint(w) @ a
    problem = cp.Problem(
        cp.Maximize(cp.real(cp.trace(adjoint(g) @ a))), [cp.sigma_max(a) <= 1, inner + inner.H == 0]
    )
    problem.solve(solver=cp.CLARABEL)
    value: Any = problem.value
    return float(value)


def best_unitary(point, grad):
    """Return half the nuclear norm of `W^* G - G^* W`."""
    w, g = (x[0].astype(np.float64) + 1j * x[1] for x in (point, grad))
    return float(np.linalg.norm(adjoint(w) @ g - adjoint(g) @ w, "nuc")) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manifold", "shape", "optimum"),
    [
        (ComplexStiefel(), (2, 5, 2), best),
        (ComplexStiefel(2.0), (2, 2, 3, 5), None),
        (ComplexStiefel(), (2, 3, 3), best_unitary),
        (ComplexStiefel(), (2, 1, 1), best_unitary),
    ],
    ids=["tall", "a wide stack of scale 2", "unitary", "the circle"],
)
def test_complex_stiefel_satisfies_manifold_laws(manifold, shape, optimum):
    check_manifold(manifold, shape, jax.random.key(0), thorough=False, optimum=optimum)


@pytest.mark.slow
def test_complex_norm_satisfies_norm_laws():
    check_norm(ComplexStiefel(2.0).norm, (2, 4, 3), jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "retraction",
    [retractions.Polar(), retractions.Cayley(), retractions.Exponential()],
    ids=lambda r: type(r).__name__,
)
def test_retractions_have_declared_order(retraction):
    manifold = ComplexStiefel(retraction=retraction)
    check_slopes(manifold, (2, 4, 2), jax.random.key(1), order=retraction.order)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_projection_is_complex_polar_factor(rank):
    given = normal(6, 2, 5, rank) @ normal(7, 2, rank, 3)
    with jax.enable_x64(True):
        found = np.asarray(to_complex(ComplexStiefel().project(from_complex(jnp.asarray(given)))))
    np.testing.assert_allclose(
        adjoint(found) @ found, np.broadcast_to(np.eye(3), (2, 3, 3)), atol=1e-13
    )
    attained = np.einsum("bij,bij->b", given.conj(), found).real
    nuclear = np.linalg.svd(given, compute_uv=False).sum(-1)
    np.testing.assert_allclose(attained, nuclear, atol=1e-12)


@pytest.mark.slow
def test_minimize_solves_unitary_procrustes():
    a, b = normal(8, 6, 4), normal(9, 6, 4)

    def cost(x):
        return jnp.sum(jnp.abs(a @ to_complex(x) - b) ** 2)

    with jax.enable_x64(True):
        start = ComplexStiefel().random_point(jax.random.key(10), (2, 4, 4), jnp.float64)
        found = minimize(cost, ComplexStiefel(), start)
        assert Reason(int(found.reason)) is Reason.GRADIENT
        np.testing.assert_allclose(to_complex(found.point), polar(adjoint(a) @ b), atol=1e-10)


@pytest.mark.slow
def test_projection_gradient_matches_finite_difference():
    x = jnp.asarray(from_complex(jnp.asarray(normal(13, 4, 2).astype(np.complex64))))
    gradient = jax.grad(lambda x: ComplexStiefel().project(x)[0, 0, 0])(x)
    h = 1e-2 * jax.random.normal(jax.random.key(14), x.shape)
    value = lambda x: float(ComplexStiefel().project(x)[0, 0, 0])  # noqa: E731
    np.testing.assert_allclose(
        (value(x + h) - value(x - h)) / 2, float(jnp.sum(gradient * h)), atol=1e-5
    )
