"""Inverse roots of symmetric matrices, against eigenvalues in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import linalg
from manifoldmuon._internal.matrices import polar as polar_parts
from manifoldmuon.linalg import CUBIC, PolarExpress
from tests.compiled import ask
from tests.linalg.instances import conditioned

inverse_sqrt = jax.jit(linalg.inverse_sqrt, static_argnames="schedule")
EPS = float(np.finfo(np.float32).eps)


def gram_of(condition: float, n: int = 6) -> np.ndarray:
    x = conditioned((2 * n, n), condition)
    return x.T @ x


def inverse_root(s: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(s)
    return vectors / np.sqrt(values)[..., None, :] @ vectors.mT


@pytest.mark.parametrize("schedule", [None, CUBIC], ids=["default", "cubic"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_inverse_sqrt_matches_eigenvalues(scale, schedule):
    s = np.stack([scale * gram_of(c) for c in (1.0, 10.0, 100.0)])
    options = {} if schedule is None else {"schedule": schedule}
    found = np.asarray(inverse_sqrt(jnp.float32(s), **options), np.float64)
    np.testing.assert_array_equal(found, found.mT)
    for one, q, condition in zip(s, found, (1, 1e2, 1e4), strict=True):
        expected = inverse_root(one)
        assert np.abs(q - expected).max() <= 10 * EPS * condition * np.abs(expected).max()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_inverse_sqrt_derivative_matches_eigenvalues(scale):
    """The square of a tiny trace underflows in float32; the derivative does not."""
    rng = np.random.default_rng(1)
    s, e, c = gram_of(3.0, 4), *rng.standard_normal((2, 4, 4))
    values, vectors = np.linalg.eigh(s)
    roots = np.sqrt(values)
    rates = -1 / (roots[:, None] * roots * (roots[:, None] + roots))
    expected = vectors @ (rates * (vectors.T @ (e + e.T) @ vectors)) @ vectors.T
    x, e = np.float32(scale * s), np.float32(scale * (e + e.T))
    forward = ask(lambda x, e: jax.jvp(linalg.inverse_sqrt, (x,), (e,))[1], x, e)
    backward = ask(jax.grad(lambda x: jnp.sum(np.float32(c) * linalg.inverse_sqrt(x))), x)
    size = np.abs(expected).max()
    np.testing.assert_allclose(np.sqrt(scale) * forward, expected, atol=2e-5 * size)
    slope = np.sqrt(scale) * np.sum(np.float64(backward) * e)
    np.testing.assert_allclose(slope, np.sum(c * expected), atol=2e-5 * size)


@pytest.mark.parametrize("bound", [1.25, "array"])
def test_inverse_sqrt_near_the_identity_in_two_steps(bound):
    rng = np.random.default_rng(0)
    v = rng.standard_normal((3, 9, 5))
    v *= 0.5 / np.linalg.norm(v, 2, axis=(-2, -1), keepdims=True)
    s = np.eye(5) + v.mT @ v
    limit = jnp.full(3, 1.25) if bound == "array" else bound
    schedule = PolarExpress(1 / np.sqrt(1.25), steps=2)
    found = ask(lambda s: linalg.inverse_sqrt(s, schedule, limit), np.float32(s))
    np.testing.assert_allclose(found, inverse_root(s), atol=4 * EPS)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.02, 0.5, 0.99])
def test_inverse_sqrt_minus_one_relative_accuracy(size):
    rng = np.random.default_rng(0)
    v = rng.standard_normal((7, 7))
    s = v + v.T
    s *= size / np.linalg.norm(s, 2)
    found = jax.jit(polar_parts.inverse_sqrt_minus_one, static_argnums=1)(np.float32(s), 20)
    values, vectors = np.linalg.eigh(np.float64(np.float32(s)))
    expected = vectors * np.expm1(-np.log1p(values) / 2) @ vectors.T
    loss = 8 * EPS / (1 - size)  # of the smallest eigenvalue of I + E
    np.testing.assert_allclose(found, expected, atol=loss * np.abs(expected).max())
    assert polar_parts.largest_row_sum(jnp.asarray(s)) == pytest.approx(np.abs(s).sum(1).max())


def test_inverse_sqrt_of_singular_and_nan_matrices():
    spoilt = jnp.stack([jnp.zeros((4, 4)), jnp.ones((4, 4)), jnp.full((4, 4), jnp.nan)])
    zero, one, nan = np.asarray(inverse_sqrt(spoilt))
    assert np.isfinite(zero).all()
    u = np.full(4, 0.5)
    # Rounding is relative to the largest eigenvalue of the result, on the amplified null space.
    np.testing.assert_allclose(u @ one @ u, 0.5, atol=EPS * np.abs(one).max())
    assert np.isfinite(one).all()
    assert np.isnan(nan).all()
