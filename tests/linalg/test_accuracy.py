"""Orthogonality and forward error in float32, against a float64 SVD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import clip_singular_values, msign
from tests.linalg.instances import ACCURATE, MethodCase, conditioned, polar
from tests.tolerances import rounding

EPS = float(np.finfo(np.float32).eps)
CONDITIONS = (1.0, 1e3, 1e6)


@pytest.mark.parametrize("shape", [(64, 64), (24, 96)], ids=str)
@pytest.mark.parametrize("case", ACCURATE, ids=lambda case: case.name)
def test_accurate_methods_up_to_condition_1e6(case: MethodCase, shape):
    x, n = np.asarray([conditioned(shape, c) for c in CONDITIONS], np.float32), min(shape)
    found = np.asarray(msign(jnp.asarray(x), case.method), np.float64)
    for matrix, q, condition in zip(x, found, CONDITIONS, strict=True):
        tall = q if shape[0] >= shape[1] else q.T
        assert np.linalg.norm(tall.T @ tall - np.eye(n)) <= 10 * EPS * np.sqrt(n)
        if condition < 1e6:  # a float32 matrix of condition 1e6 hardly has a polar factor
            error = np.linalg.norm(q - polar(matrix)) / np.sqrt(n)
            assert error <= rounding(case.products, max(shape), condition)


@pytest.mark.parametrize("top", [1, 16])
def test_few_large_singular_values_among_tiny(top):
    """The largest value equals the bound that normalises the matrix; it must not exceed it."""
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((32, 32)))[0] for _ in range(2))
    x = (left * np.where(np.arange(32) < top, 1, 1e-5)) @ right
    q = np.asarray(msign(jnp.float32(x)), np.float64)
    assert np.linalg.norm(q.T @ q - np.eye(32)) <= 10 * EPS * np.sqrt(32)


@pytest.mark.slow_except(
    "shape1-1-1-float32", "shape2-1e-09-1-float32", "shape3-1e-25-1e-25-float32"
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "size", "upper"),
    [((40, 40), 1, 1), ((12, 30), 1, 1), ((12, 30), 1e-9, 1), ((12, 30), 1e-25, 1e-25)],
)
def test_clip_singular_values_accurate_to_rounding(shape, size, upper, dtype):
    """Errors are relative to the largest singular value."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(size * rng.standard_normal(shape), dtype)
        found = np.float64(clip_singular_values(x, float(upper)))
    left, values, right = np.linalg.svd(np.float64(x), full_matrices=False)
    wanted = (left * np.minimum(values, upper)) @ right
    assert np.linalg.norm(found - wanted, 2) <= 30 * np.finfo(dtype).eps * values[0]
