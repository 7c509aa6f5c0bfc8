"""Baseline methods for msign: laws of the interface, accuracy, and the sketch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import msign
from manifoldmuon.testing import check_msign
from studies.polar_methods import QDWH, GramEigh, InverseRoot, Sketch, inverse_root
from tests.linalg.instances import conditioned, polar

# Forward error in units of eps times the condition number.
METHODS = {QDWH(): 8, GramEigh(): 64, InverseRoot(): 8}
EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    "method", [*METHODS, Sketch(2, oversample=0)], ids=lambda m: type(m).__name__
)
def test_methods_satisfy_msign_laws(method):
    orthogonality = math.inf if isinstance(method, Sketch) else 10.0
    check_msign(method, (2, 3, 5), jax.random.key(1), orthogonality)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_accuracy_up_to_condition_number_1e6(method):
    for condition in (1.0, 1e3, 1e6):
        x = conditioned((24, 96), condition).astype(np.float32)
        q = np.asarray(msign(jnp.asarray(x), method), np.float64)
        assert np.linalg.norm(q @ q.T - np.eye(24)) <= 10 * EPS * np.sqrt(24)
        if condition < 1e6:
            error = np.linalg.norm(q - polar(x)) / np.sqrt(24)
            assert error <= METHODS[method] * EPS * condition


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)], ids=str)
def test_sketch_finds_leading_directions_with_gap(shape):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((k, 24)))[0] for k in shape)
    values = np.where(np.arange(24) < 3, [4.0, 3.0, 2.0] + [0.0] * 21, 0.02)
    x = jnp.asarray(left * values @ right.T, jnp.float32)
    expected = left[:, :3] @ right[:, :3].T
    np.testing.assert_allclose(msign(x, Sketch(3)), expected, atol=1e-5)


def test_sketch_of_full_rank_is_polar_factor():
    x = np.random.default_rng(1).standard_normal((7, 4)).astype(np.float32)
    np.testing.assert_allclose(msign(jnp.asarray(x), Sketch(9)), polar(x), atol=1e-5)


def test_sketch_depends_only_on_seed():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((9, 9)), jnp.float32)
    crude = Sketch(2, oversample=0, power_iterations=0)
    np.testing.assert_array_equal(msign(x, crude), msign(x, Sketch(2, 0, 0)))
    assert np.abs(msign(x, crude) - msign(x, Sketch(2, 0, 0, seed=1))).max() > 0.01


@pytest.mark.parametrize("root", [1, 2, 3, 4])
def test_inverse_root_matches_eigendecomposition(root):
    x = conditioned((12, 6), 10.0)
    s = 3 * x.T @ x
    found = inverse_root(jnp.float32(s), root)
    values, vectors = np.linalg.eigh(s)
    expected = vectors * values ** (-1 / root) @ vectors.T
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


def test_shampoo_fourth_roots_give_msign():
    g = conditioned((4, 4), 5.0).astype(np.float32)
    left, right = (inverse_root(jnp.asarray(s), 4) for s in (g @ g.T, g.T @ g))
    np.testing.assert_allclose(left @ g @ right, polar(g), atol=1e-4)
