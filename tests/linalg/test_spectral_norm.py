"""The spectral norm: accurate, and by warm-started power iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import linalg
from manifoldmuon._internal.matrices import spectral
from tests.linalg.instances import conditioned

power_iteration = jax.jit(linalg.power_iteration, static_argnames="steps")
spectral_norm = jax.jit(linalg.spectral_norm)
spectral_bound = jax.jit(spectral.spectral_bound)
largest_eigenpair = jax.jit(spectral.largest_eigenpair, static_argnums=1)
largest_eigenvalue = jax.jit(spectral.largest_eigenvalue, static_argnums=1)

SCALES = (1e-30, 1e-3, 1.0, 1e30)


def stack(shape) -> np.ndarray:
    return np.stack([c * conditioned(shape, 100.0) for c in SCALES]).astype(np.float32)


@pytest.mark.parametrize("shape", [(9, 4), (1, 5)], ids=str)
def test_spectral_norm_at_any_scale(shape):
    np.testing.assert_allclose(spectral_norm(jnp.asarray(stack(shape))), SCALES, rtol=1e-6)


def test_power_iteration_cold_and_warm_start():
    x, sizes = jnp.asarray(stack((9, 4))), np.array(SCALES)
    cold, vector = power_iteration(x, jnp.zeros((4, 4)), steps=1)
    assert np.all((0.5 * sizes < cold) & (cold <= sizes * (1 + 1e-6)))
    for _ in range(3):
        sigma, vector = power_iteration(x, vector)
    np.testing.assert_allclose(sigma, SCALES, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vector, axis=-1), 1, rtol=1e-6)
    right = np.linalg.svd(conditioned((9, 4), 100.0))[2][0]
    np.testing.assert_allclose(np.abs(vector @ right), 1, rtol=1e-6)


def test_power_iteration_leaves_null_space():
    x = jnp.diag(jnp.array([3.0, 0.0]))
    sigma, vector = power_iteration(x, jnp.array([0.0, 1.0]))
    assert sigma == 3
    np.testing.assert_array_equal(vector, [1, 0])


@pytest.mark.slow_except("False-float32", "True-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("turned", [False, True])
def test_power_iteration_leaves_invariant_subspace(dtype, turned):
    """The warm vector lies in one diagonal block; the other block is 1e4 times larger."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (12, 8))
    blocks = np.zeros((2, 12, 8))
    blocks[0, :6, :4] = blocks[1, :6, :4] = 1e-2 * rng.standard_normal((6, 4))
    blocks[1, 6:, 4:] = 1e2 * rng.standard_normal((6, 4))
    blocks = left @ blocks @ right if turned else blocks
    with jax.enable_x64(dtype == "float64"):
        first, second = jnp.asarray(blocks, dtype)
        vector = power_iteration(first, jnp.zeros(8, dtype), steps=50)[1]
        exact = np.linalg.norm(np.asarray(second, np.float64), 2)
        ratios = []
        for _ in range(4):
            sigma, vector = power_iteration(second, vector)
            ratios.append(float(sigma) / exact)
        assert vector.dtype == dtype
    # Plain power iteration would stay at 1e-4. The progress of the first call depends on rounding.
    assert ratios[0] > 0.5
    assert ratios[1] > 0.99
    assert 0.999 < ratios[-1] < 1 + 1e-6


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 4)], ids=str)
def test_estimate_is_at_least_longest_row_and_column(shape):
    """Rows or columns are equal, and the vector is nearly orthogonal to the rows."""
    rng = np.random.default_rng(1)
    x = jnp.float32(np.outer(rng.standard_normal(shape[0]), np.ones(shape[1])))
    for matrix in (x, jnp.ones(shape)):
        vector = jnp.zeros(shape[1]).at[0].set(1.0)
        vector = vector.at[-1].add(-1 + 1e-3) if shape[1] > 1 else vector
        sigma, after = power_iteration(matrix, vector, steps=0)
        exact = np.linalg.norm(matrix, 2)
        lengths = [np.linalg.norm(matrix, axis=axis).max() for axis in (0, 1)]
        np.testing.assert_allclose(sigma, max(lengths), rtol=1e-6)
        assert exact <= np.sqrt(min(shape)) * sigma * (1 + 1e-6)
        np.testing.assert_allclose(after, vector / np.linalg.norm(vector), atol=1e-6)


def test_power_iteration_of_zero_and_nan():
    x = jnp.stack([jnp.zeros((3, 2)), jnp.full((3, 2), jnp.nan), jnp.ones((3, 2))])
    before = jnp.array([[0.6, 0.8]] * 3, jnp.bfloat16)
    sigma, after = power_iteration(x, before)
    assert (sigma.dtype, after.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(after[0], before[0])
    for found in (sigma, spectral_norm(x)):
        np.testing.assert_allclose(found, [0, np.nan, np.sqrt(6)], rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 3)], ids=str)
def test_empty_matrices_have_norm_zero(shape):
    vector = jnp.zeros((*shape[:-2], shape[-1]))
    sigma, after = power_iteration(jnp.zeros(shape), vector)
    assert sigma.shape == shape[:-2] == spectral_norm(jnp.zeros(shape)).shape
    assert after.shape == vector.shape
    assert not np.any(sigma)


@pytest.mark.slow_except("rank 1", "all equal", "three values", "one above equals")
@pytest.mark.parametrize(
    "family",
    ["one large", "crowded at the top", "all equal", "rank 1", "one above equals", "three values"],
)
def test_lanczos_is_accurate_and_below_eigenvalue(family):
    n, rng = 128, np.random.default_rng(3)
    basis = np.linalg.qr(rng.standard_normal((3, n, n)))[0]
    values = {
        "one large": np.append(rng.uniform(0, 1, n - 1), 1.1),
        "crowded at the top": rng.uniform(0.9, 1, n),
        "all equal": np.ones(n),
        "rank 1": np.append(np.zeros(n - 1), 3.0),
        # Krylov spaces of 2 and 3 dimensions: later steps see only rounding.
        "one above equals": np.append(np.full(n - 1, 0.8), 1.0),
        "three values": np.repeat([0.5, 0.9, 1.0], [n - 10, 8, 2]),
    }[family]
    gram, top = jnp.float32((basis * values) @ basis.mT), values.max()
    found, vectors = (np.asarray(x) for x in largest_eigenpair(gram, 24))
    assert found.shape == (3,)
    assert np.all((top * (1 - 1e-3) <= found) & (found <= top * (1 + 1e-6)))
    np.testing.assert_allclose(largest_eigenvalue(gram, 24), found, rtol=1e-5)
    values_of_vectors = np.einsum("bi,bij,bj->b", vectors, gram, vectors)
    np.testing.assert_allclose(values_of_vectors, found, rtol=1e-5)
    bound = spectral_bound(np.linalg.cholesky(gram + np.float32(1e-6) * np.eye(n, dtype="f")))
    assert np.all((top <= bound**2) & (bound**2 <= top * 1.0101 + 2e-6))


def test_lanczos_of_zero_is_zero():
    zero = jnp.zeros((2, 4, 4))
    assert np.all(largest_eigenpair(zero, 24)[0] == 0)
    assert np.all(largest_eigenvalue(zero, 24) == 0)
