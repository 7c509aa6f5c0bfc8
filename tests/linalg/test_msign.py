"""Edge cases of msign: empty and rank-deficient matrices, transformations, invalid arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import DEFAULT_MSIGN, SVD, MsignMethod, msign
from tests.linalg.instances import conditioned, polar

DIRECT = [DEFAULT_MSIGN, SVD()]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4), (0, 3, 4)], ids=str)
def test_empty_matrices_keep_shape_and_dtype(shape):
    found = msign(jnp.zeros(shape, jnp.bfloat16))
    assert found.shape == shape
    assert found.dtype == jnp.bfloat16


@pytest.mark.parametrize("method", DIRECT, ids=lambda method: type(method).__name__)
def test_rows_and_columns_of_zeros_stay_zero(method):
    x = np.zeros((6, 5), np.float32)
    x[:4, :3] = conditioned((4, 3), 10.0)
    expected = np.zeros((6, 5))
    expected[:4, :3] = polar(x[:4, :3])
    np.testing.assert_allclose(msign(jnp.asarray(x), method), expected, atol=2e-6)


@pytest.mark.parametrize("method", DIRECT, ids=lambda method: type(method).__name__)
def test_rank_deficient_is_exact_on_range(method):
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.standard_normal((12, 2)))[0]
    right = np.linalg.qr(rng.standard_normal((8, 2)))[0]
    q = np.asarray(msign(jnp.asarray(left * [1.0, 0.5] @ right.T, jnp.float32), method))
    assert np.linalg.norm(q, 2) <= 1 + 1e-5
    np.testing.assert_allclose(q @ right, left, atol=1e-5)


def test_vmap_and_scan_match_loop():
    x = jnp.asarray(np.stack([conditioned((5, 3), c) for c in (1.0, 4.0)]), jnp.float32)
    loop = np.stack([polar(np.asarray(one)) for one in x])
    np.testing.assert_allclose(jax.vmap(msign)(x), loop, atol=2e-6)
    scanned = jax.lax.scan(lambda _, one: (None, msign(one)), None, x)[1]
    np.testing.assert_allclose(scanned, loop, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_wide_matches_transpose_and_keeps_dtype(dtype):
    x = jnp.asarray(conditioned((5, 3), 4.0), dtype)
    tall, wide = msign(x), msign(x.T)
    assert tall.dtype == wide.dtype == dtype
    np.testing.assert_array_equal(wide.T.astype(jnp.float32), tall.astype(jnp.float32))
    expected = polar(np.asarray(x.astype(jnp.float32)))
    np.testing.assert_allclose(tall.astype(jnp.float32), expected, atol=float(jnp.finfo(dtype).eps))


def test_power_of_two_scaling_is_exact():
    x = jnp.asarray(conditioned((5, 3), 7.0), jnp.float32)
    np.testing.assert_array_equal(msign(x * 2.0**90), msign(x))


@pytest.mark.parametrize(
    ("x", "method", "error", "words"),
    [
        (jnp.ones(3), None, ValueError, "trailing two axes"),
        (jnp.ones((2, 2), jnp.int32), None, TypeError, "floating dtype"),
        (jnp.ones((2, 2)), SVD, TypeError, r"such as SVD\(\)"),
        (jnp.ones((2, 2)), "svd", TypeError, r"such as SVD\(\)"),
    ],
    ids=["vector", "integers", "class", "string"],
)
def test_invalid_arguments_raise(x, method, error, words):
    unchecked = inspect.unwrap(msign)  # without the suite's type checker, as for users
    with pytest.raises(error, match=words):
        unchecked(x, method)


def test_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        MsignMethod()  # type: ignore[abstract]
