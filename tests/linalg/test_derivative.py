"""Derivatives of msign against the closed form, and of functions with loops by differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon._internal.matrices.arrays import sym
from manifoldmuon._internal.matrices.polar import solve_lyapunov
from manifoldmuon._internal.matrices.spectral import largest_eigenpair, largest_eigenvalue
from manifoldmuon.linalg import MUON, SVD, NewtonSchulz, msign
from tests.compiled import ask
from tests.linalg.instances import conditioned, polar


@jax.jit
def derivatives(x, e, c):
    """Return the forward-mode derivative along e and the gradient for the weights c."""
    return jax.jvp(msign, (x,), (e,))[1], jax.grad(lambda x: jnp.sum(c * msign(x)))(x)


@jax.jit
def second(x, e, c):
    """Return the second derivative of `<c, msign(x + t e)>` at t = 0."""
    return jax.grad(jax.grad(lambda t: jnp.sum(c * msign(x + t * e))))(0.0)


def single(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def formula(x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return U [(F - F^T) / (s_i + s_j)] V^T + (I - U U^T) E V S^-1 V^T for a tall x."""
    if x.shape[0] < x.shape[1]:
        return formula(x.T, e.T).T
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    f = u.T @ e @ vt.T
    outside = e - u @ (u.T @ e)
    return u @ ((f - f.T) / (s[:, None] + s)) @ vt + outside @ (vt.T / s) @ vt


@pytest.mark.parametrize("condition", [1.0, 20.0], ids=["orthonormal", "general"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 4), (3, 5)], ids=str)
def test_jvp_and_grad_match_closed_form(shape, condition):
    x = conditioned(shape, condition)
    rng = np.random.default_rng(1)
    e, c = rng.standard_normal((2, *shape))
    expected = formula(x, e)
    tol = 2e-6 * condition
    difference = (polar(x + 1e-5 * e) - polar(x - 1e-5 * e)) / 2e-5
    np.testing.assert_allclose(difference, expected, atol=1e-6 * condition**3)
    found, pull = derivatives(*single(x, e, c))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=tol)
    np.testing.assert_allclose(np.sum(pull * e), np.sum(c * expected), atol=10 * tol * scale)


@pytest.mark.parametrize("method", [SVD(), NewtonSchulz(MUON)], ids=["svd", "muon"])
def test_methods_share_the_exact_derivative(method):
    x, e = conditioned((5, 3), 3.0), np.random.default_rng(2).standard_normal((5, 3))
    _, found = ask(lambda *x: jax.jvp(lambda x: msign(x, method), x[:1], x[1:]), *single(x, e))
    np.testing.assert_allclose(found, formula(x, e), rtol=1e-4, atol=1e-5)


def test_svd_derivative_of_ill_conditioned_matrix():
    """Rotating x rotates its factor; a condition of 1e9 is far beyond the default method."""
    x, rng = conditioned((4, 4), 1e9), np.random.default_rng(4)
    turn = rng.standard_normal((4, 4))
    turn = turn - turn.T
    with jax.enable_x64(True):
        ask = jax.jit(lambda *x: jax.jvp(lambda x: msign(x, SVD()), x[:1], x[1:])[1])
        found = np.asarray(ask(jnp.asarray(x), jnp.asarray(turn @ x)))
    # Rounding of the products, eps times the condition number.
    np.testing.assert_allclose(found, turn @ polar(x), atol=1e-5)


@pytest.mark.parametrize("condition", [1.0, 3.0], ids=["orthonormal", "general"])
def test_second_derivative_matches_differences(condition):
    x, rng = conditioned((4, 3), condition), np.random.default_rng(3)
    e, c = rng.standard_normal((2, 4, 3)) / 4
    h = 1e-3
    up, here, down = (np.sum(c * polar(x + t * e)) for t in (h, 0, -h))
    found = second(*single(x, e, c))
    np.testing.assert_allclose(found, (up - 2 * here + down) / h**2, rtol=2e-3, atol=1e-4)


def test_derivative_scaling_and_short_dtypes():
    x = jnp.asarray(conditioned((4, 3), 3.0), jnp.float32)
    pull = jax.jit(jax.grad(lambda x: jnp.sum(msign(x)[0])))
    np.testing.assert_allclose(pull(x * 2.0**60) * 2.0**60, pull(x), rtol=1e-6, atol=1e-6)
    short = pull(x.astype(jnp.bfloat16))
    assert short.dtype == jnp.bfloat16
    rounded = pull(x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(short.astype(jnp.float32), rounded, atol=0.05)
    assert np.abs(rounded).max() > 0.5


def test_missing_directions_have_zero_derivative():
    """At rank one, the derivative on range and co-range equals the full-rank block's."""
    entry = lambda *index: jnp.zeros((4, 3)).at[index].set(1.0)  # noqa: E731
    for e, expected in ((entry(1, 0), entry(1, 0) / 2), (entry(1, 1), jnp.zeros((4, 3)))):
        np.testing.assert_allclose(derivatives(2 * entry(0, 0), e, e)[0], expected, atol=1e-6)


def test_derivative_at_zero_rank_one_and_nan():
    ones = jnp.ones((3, 4, 3))
    x = jnp.asarray([0.0, 1.0, jnp.nan])[:, None, None] * ones
    _, (zero, rank_one, nan) = derivatives(x, ones, ones)
    assert not np.any(zero)
    np.testing.assert_allclose(rank_one, 0, atol=1e-6)  # along the singular vectors
    assert np.isnan(nan).all()


FUNCTIONS = {
    "the largest eigenvector": lambda x: largest_eigenpair(x.T @ x, 24)[1],
    "the largest eigenvalue": lambda x: largest_eigenvalue(x.T @ x, 24),
    "a Lyapunov equation": lambda x: solve_lyapunov(x.T @ x, sym(x[:3]) + jnp.eye(3)),
}


@pytest.mark.slow_except("a Lyapunov equation")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_looped_functions_have_higher_derivatives(name):
    """Compare reverse mode, once and twice, with float64 differences."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        x, e = (jnp.asarray(a) for a in rng.standard_normal((2, 5, 3)))
        c = jnp.asarray(rng.standard_normal(jax.eval_shape(FUNCTIONS[name], x).shape))

        def along(t):
            return jnp.sum(c * FUNCTIONS[name](x + t * e))

        before, down, here, up, after = map(jax.jit(along), (-1e-3, -1e-5, 0.0, 1e-5, 1e-3))
        expected = (up - down) / 2e-5, (before - 2 * here + after) / 1e-6
        slope = jax.grad(along)
        found = jax.jit(lambda t: (slope(t), jax.grad(slope)(t)))(0.0)
    assert np.abs(expected[0]) > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_tied_eigenvectors_have_finite_derivative():
    tied = jnp.eye(3).at[2, 2].set(0.0)
    turned = jax.jacrev(lambda s: largest_eigenpair(s, 24)[1])(tied)
    assert np.isfinite(turned).all()
    _, vector = largest_eigenpair(tied, 24)
    # The third eigenvalue is lower by 1, so the eigenvector turns there by the perturbation itself.
    np.testing.assert_allclose(turned[2, 2, :], vector, atol=1e-5)
    zero = jnp.zeros((4, 4))
    assert not np.isnan(jax.grad(lambda s: largest_eigenpair(s, 4)[1][0])(zero)).any()
