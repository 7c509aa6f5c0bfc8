"""The sketch finds the leading singular directions."""

import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import Sketch, msign
from tests.linalg.instances import polar


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)], ids=str)
def test_leading_directions_with_a_gap_behind(shape):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((k, 24)))[0] for k in shape)
    values = np.where(np.arange(24) < 3, [4.0, 3.0, 2.0] + [0.0] * 21, 0.02)
    x = jnp.asarray(left * values @ right.T, jnp.float32)
    expected = left[:, :3] @ right[:, :3].T
    np.testing.assert_allclose(msign(x, Sketch(3)), expected, atol=1e-5)


def test_a_rank_beyond_the_matrix_is_the_whole_factor():
    x = np.random.default_rng(1).standard_normal((7, 4)).astype(np.float32)
    np.testing.assert_allclose(msign(jnp.asarray(x), Sketch(9)), polar(x), atol=1e-5)


def test_the_seed_is_the_only_randomness():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((9, 9)), jnp.float32)
    crude = Sketch(2, oversample=0, power_iterations=0)
    np.testing.assert_array_equal(msign(x, crude), msign(x, Sketch(2, 0, 0)))
    assert np.abs(msign(x, crude) - msign(x, Sketch(2, 0, 0, seed=1))).max() > 0.01


@pytest.mark.parametrize("options", [(0,), (1, -1), (1, 0, -1)], ids=str)
def test_refuses(options):
    with pytest.raises(ValueError, match="Sketch.* must be a whole number in"):
        Sketch(*options)
