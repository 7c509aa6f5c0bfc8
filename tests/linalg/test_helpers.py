"""Scaling by powers of two, symmetric parts and products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon._internal.matrices import arrays
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.matrices.spectral import contraction_factor

TOPS = [1.0, -3.0, 1e-30, 2.0**-126, 2.0**-149, -(2.0**-130), 3.4e38]
WIDE = [1.5, -1e300, 2.0**-1022, -(2.0**-1074), 3 * 2.0**-1060]


@pytest.mark.parametrize(
    ("top", "dtype"), [(x, "float32") for x in TOPS] + [(x, "float64") for x in WIDE]
)
def test_unit_scaling_is_exact(top, dtype):
    x = np.array([[top, top / 2], [0, -top / 4]], dtype)
    with jax.enable_x64(dtype == "float64"):
        scaled, exponent = scale_to_unit_exponent(jnp.asarray(x), 2)
    assert 1 <= np.abs(scaled).max() < 2
    back = np.ldexp(np.asarray(scaled, np.float64), int(exponent))
    np.testing.assert_array_equal(back, x.astype(np.float64))


def test_unit_scaling_per_block():
    x = np.ones((5, 3), np.float32)
    x[1], x[2], x[3, 0], x[4, 2] = 0, 1e-40, np.nan, np.inf
    scaled, exponent = scale_to_unit_exponent(jnp.asarray(x), 1)
    np.testing.assert_array_equal(scaled[:2], [[1] * 3, [0] * 3])
    np.testing.assert_array_equal(exponent, [0, 0, -133, 0, 0])
    assert np.isnan(scaled[3:]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_scalings_of_short_dtypes(dtype):
    # The smallest bfloat16 is a float32 denormal.
    smallest = jnp.asarray(np.array([float(jnp.finfo(dtype).smallest_subnormal)]), dtype)
    scaled, _ = scale_to_unit_exponent(smallest, 1)
    assert (scaled, scaled.dtype) == (1, jnp.float32)
    found = times_power_of_two(jnp.array([1, -1.5, 0], dtype), jnp.array(4))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, [16, -24, 0])


def test_unit_scaling_of_empty_and_too_few_axes():
    scaled, exponent = scale_to_unit_exponent(jnp.zeros((2, 0, 3)), 2)
    assert scaled.shape == (2, 0, 3)
    np.testing.assert_array_equal(exponent, [0, 0])
    with pytest.raises(ValueError, match="expected at least 2 axes"):
        scale_to_unit_exponent(jnp.ones(3), 2)


def test_scalings_differentiate_inside_shard_map():
    """Inside shard_map the tangent of an exponent varies over the mesh, like the exponent."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def there_and_back(x):
        return jnp.sum(times_power_of_two(*scale_to_unit_exponent(x, 1), 1) ** 2)

    spec, x = jax.sharding.PartitionSpec("a"), np.arange(8, dtype=np.float32).reshape(4, 2)
    sharded = jax.shard_map(jax.grad(there_and_back), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(sharded)(x), 2 * x)


def test_times_power_of_two_with_extreme_exponents():
    x = jnp.array([[2.0**-120, 3], [1, 1], [2.0**100, 0], [2.0**100, 0], [1, 0]])
    found, tiny = times_power_of_two(x, jnp.array([200, -126, -226, -300, 300]), 1), 2.0**-126
    wanted = [[2.0**80, np.inf], [tiny, tiny], [tiny, 0], [0, 0], [np.inf, 0]]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("exponent", [-140, 3, 140])
def test_times_power_of_two_derivative_is_linear(exponent):
    power = jnp.array(exponent)
    x, moved = jnp.array([1.0, 0, 2.0**-140, -3]), jnp.array([0.25, 1, -1, 0.5])
    found = jax.jvp(lambda x: times_power_of_two(x, power, 1), (x,), (moved,))[1]
    np.testing.assert_array_equal(found, times_power_of_two(moved, power, 1))
    pulled = jax.grad(lambda x: jnp.sum(times_power_of_two(x, power, 1) * moved))(x)
    np.testing.assert_array_equal(pulled, found)


def test_symmetric_and_skew_parts_of_huge_matrices():
    x = jnp.float32(3e38 * np.random.default_rng(0).uniform(-1, 1, (2, 3, 3)))
    s, k = arrays.sym(x), arrays.skew(x)
    np.testing.assert_array_equal(s, s.mT)
    np.testing.assert_array_equal(k, -k.mT)
    np.testing.assert_allclose(s + k, x, atol=1e32)


def test_product_sums_in_float32():
    x = jnp.ones((1, 600), jnp.bfloat16)
    exact = arrays.product(x, x.mT)
    assert exact.dtype == jnp.float32
    assert exact == 600  # a sum in bfloat16 stops at 256
    rounded = arrays.product(jnp.full((1, 1), 1.001), jnp.ones((1, 1)), operands=jnp.bfloat16)
    assert rounded == 1


SPECTRA = {
    "single": lambda n, top, base: np.r_[top, np.full(n - 1, base)],
    "few": lambda n, top, base: np.r_[np.full(4, top), np.full(n - 4, base)],
    "even": lambda n, top, base: np.linspace(base, top, n),
    "edge": lambda n, top, base: 1 + (top - 1) * np.linspace(0, 1, n) ** 8,
}


@pytest.mark.parametrize("width", [5, 300])
@pytest.mark.parametrize(
    "base", [*(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0)), 0.5]
)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_contraction_factor_shortens_any_spectrum(spectrum, base, width):
    """One large singular value among zeros, too, as of a sparse gradient."""
    margin = 0.006
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((width, width)))[0]
    for top in (1.003, 1.005, 1.01, 1.1, 1.2):
        values = SPECTRA[spectrum](width, top, base)
        gram = np.float32((turn * values**2) @ turn.T)
        factor = float(contraction_factor(jnp.asarray(gram), margin)[0, 0])
        assert (1 - margin) / (1 + margin) / max(values) < factor < (1 + 1e-6) / max(values)
