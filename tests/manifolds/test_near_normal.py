"""Ties of singular values and short dtypes, checked in float64 by decompositions.

The laws and the random cases (tests/test_reliability.py) check gradients nearly normal to the set.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import Euclidean, SpectralSphere
from manifoldmuon.norms import Frobenius, MaxAbs, Spectral
from manifoldmuon.testing._assertions import wide
from tests.oracles.sets import size_of


@functools.partial(jax.jit, static_argnums=0)
def solve(manifold, point, grad):
    return manifold.steepest(point, grad, manifold.init_dual(point.shape))


NORMS = [Frobenius(), MaxAbs(), Spectral(SVD())]


def dual_norm(norm, x):
    """Compute dual norms in float64."""
    if isinstance(norm, MaxAbs):
        return np.sum(np.abs(x), (-2, -1))
    return np.linalg.norm(x, "nuc" if isinstance(norm, Spectral) else None, axis=(-2, -1))


@pytest.mark.slow_except("Frobenius()-bfloat16", "MaxAbs()-float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_gap_of_short_dtypes_covers_rounding(norm, dtype):
    """Compare rounded directions in flat space with dual norms."""
    grads = jnp.asarray(np.random.default_rng(13).standard_normal((40, 6, 4)), dtype)
    answer = jax.device_get(solve(Euclidean(norm), jnp.zeros_like(grads), grads))
    value = np.sum(wide(grads) * wide(answer.direction), (-2, -1))
    best = dual_norm(norm, wide(grads))
    assert np.all(value >= (1 - wide(answer.gap)) * best - 1e-12)
    assert np.all(answer.gap <= float(jnp.finfo(dtype).eps))


@pytest.mark.slow_except("Frobenius()")
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_spectral_sphere_near_ties_is_sound(norm):
    """Compare with the convex dual in one multiplier in float64, with directions made tangent."""
    manifold, rng = SpectralSphere(step_norm=norm), np.random.default_rng(17)
    for apart in (1e-2, 1e-4, 1e-6, 0.0):
        draws = [np.linalg.qr(rng.standard_normal((8, k, 4)))[0] for k in (6, 4)]
        points = draws[0] * np.array([1, 1 - apart, 0.5, 0.2]) @ draws[1].mT
        grads = rng.standard_normal((8, 6, 4)).astype("f4")
        points = points.astype("f4")
        answer = jax.device_get(solve(manifold, points, grads))
        rows = zip(*map(wide, (points, grads, answer.direction, answer.gap)), strict=True)
        for point, grad, direction, gap in rows:
            u, _, vt = np.linalg.svd(point)
            line = np.outer(u[:, 0], vt[0])
            best = minimize_scalar(lambda t, g=grad, n=line: dual_norm(norm, g - t * n)).fun
            feasible = direction - line * np.sum(direction * line)
            value = np.sum(grad * feasible) / max(size_of(norm, feasible), 1)
            assert value >= (1 - gap - 1e-6) * best
        assert np.max(answer.gap) <= (1e-2 if apart == 1e-2 else 1)


@pytest.mark.slow_except("(6, 4)-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (48, 40)], ids=str)
def test_normal_gradients_at_ties_give_zero_direction(shape, dtype):
    """At corners of the spectral sphere, combinations of tied singular pairs are normal."""
    rng = np.random.default_rng(23)
    tied, rank = min(shape) // 2, min(shape)
    u, v = (np.linalg.qr(rng.standard_normal((size, rank)))[0] for size in shape)
    values = np.where(np.arange(rank) < tied, 1, np.linspace(0.9, 0.1, rank))
    mixed = rng.standard_normal((tied, tied))
    grad = u[:, :tied] @ (mixed + mixed.T) @ v[:, :tied].T
    other = grad + 0.05 * rng.standard_normal(shape)
    manifold = SpectralSphere(2.0)
    points = np.stack([2 * (u * values) @ v.T] * 3)
    grads = np.stack([grad, -1e20 * grad, other])
    answer = jax.device_get(solve(manifold, *(jnp.asarray(x, dtype) for x in (points, grads))))
    assert not answer.direction[:2].any()
    assert np.array_equal(answer.gap[:2], [1, 1])
    assert answer.direction[2].any()
