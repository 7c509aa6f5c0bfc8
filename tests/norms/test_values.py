"""Norms, dual norms and duality maps against NumPy in float64, and edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import MUON, NewtonSchulz
from manifoldmuon.norms import (
    ConvRMSToRMS,
    FanRatio,
    Frobenius,
    L1ToRMS,
    MaxAbs,
    MaxRowNorm,
    RMSToRMS,
    RootDim,
    Spectral,
)
from tests.compiled import ask
from tests.instances import NORMS
from tests.linalg.instances import polar


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def singular_values(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.svd(matrix.astype(np.float64), compute_uv=False)


def check(norm, g, size, dual, direction, close=2e-6):
    np.testing.assert_allclose(ask(norm.norm, g), size, rtol=1e-6)
    np.testing.assert_allclose(ask(norm.dual_norm, g), dual, rtol=1e-6)
    np.testing.assert_allclose(ask(norm.dualize, g), direction, atol=close)


@pytest.mark.parametrize("shape", [(6, 4), (1, 4)])
def test_spectral_norms_match_svd(rng, shape):
    g = normal(rng, *shape)
    values, ratio = singular_values(g), np.sqrt(shape[0] / shape[1])
    check(Spectral(), g, values.max(), values.sum(), polar(g))
    check(RMSToRMS(), g, values.max() / ratio, values.sum() * ratio, polar(g) * ratio, 5e-6)


def test_rms_to_rms_is_operator_norm(rng):
    """The norm bounds the amplification; the top singular vector attains it."""
    w = normal(rng, 6, 4)
    rms = lambda x: np.sqrt(np.mean(x**2, axis=0))  # noqa: E731
    x = np.concatenate([normal(rng, 4, 100), np.linalg.svd(w)[2][:1].T], axis=1)
    stretch = rms(w @ x) / rms(x)
    np.testing.assert_allclose(ask(RMSToRMS().norm, w), stretch.max(), rtol=1e-5)
    assert stretch.argmax() == 100


def test_embedding_norms_match_row_lengths(rng):
    g = normal(rng, 7, 3)
    lengths, root = np.linalg.norm(g, axis=1), np.sqrt(3)
    check(L1ToRMS(), g, lengths.max() / root, root * lengths.sum(), root * g / lengths[:, None])


def test_convolution_norms_match_loop_over_taps(rng):
    """For a kernel that is not square, k_h k_w replaces k^2."""
    g, ratio = normal(rng, 3, 2, 4, 6), np.sqrt(4 / 6)
    taps = [g[i, j] for i in range(3) for j in range(2)]
    norm = 6 * max(singular_values(tap).max() for tap in taps) / ratio
    dual = sum(singular_values(tap).sum() for tap in taps) * ratio / 6
    direction = np.reshape([polar(tap) * ratio / 6 for tap in taps], g.shape)
    check(ConvRMSToRMS(), g, norm, dual, direction)


def test_maxabs_and_frobenius_match_numpy(rng):
    g = normal(rng, 4, 3)
    g[1, 2] = 0
    check(MaxAbs(), g, np.abs(g).max(), np.abs(g).sum(), np.sign(g), 0)
    assert ask(MaxAbs().norm, g) == np.abs(g).max()
    length = np.linalg.norm(g)
    check(Frobenius(), g, length, length, g / length, 2e-7)
    np.testing.assert_allclose(ask(Frobenius(ndim=1).norm, g), np.linalg.norm(g, axis=1), rtol=1e-6)


def test_maxabs_keeps_signs_of_tiny_entries():
    g = jnp.array([1e30, -1e-30, 1e-42, 0.0], jnp.float32)
    np.testing.assert_array_equal(ask(MaxAbs(ndim=1).dualize, g), [1, -1, 1, 0])


@pytest.mark.parametrize("norm", [Frobenius(), MaxAbs(), Spectral(), L1ToRMS()], ids=str)
def test_denormal_gradients_keep_direction(rng, norm):
    """XLA flushes denormals to zero; a denormal gradient must keep its direction."""
    g = rng.integers(-9, 9, size=(5, 3)).astype(np.float32) + 0.5
    tiny = (g * 2.0**-140).astype(np.float32)
    assert 0 < np.abs(tiny).max() < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(ask(norm.dualize, tiny), ask(norm.dualize, g))


def test_stale_embedding_vectors_get_zero(rng):
    # A token unseen for hundreds of steps of momentum, a rare token, and a zero row.
    g = normal(rng, 5, 4) * np.asarray([1, 1e-30, 1e-4, 0, 1], np.float32)[:, None]
    direction = ask(L1ToRMS().dualize, g)
    np.testing.assert_array_equal(direction[[1, 3]], 0)
    np.testing.assert_allclose(np.mean(direction[[0, 2, 4]] ** 2, axis=1), 1, rtol=1e-5)
    every = ask(L1ToRMS(threshold=0.0).dualize, g)
    np.testing.assert_allclose(np.mean(every[[0, 1, 2, 4]] ** 2, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(every[3], 0)


def test_gap_covers_stale_vectors():
    g, norm = (
        np.repeat(np.asarray([[1e-2], [1], [1], [1]], np.float32), 3, axis=1),
        L1ToRMS(threshold=0.1),
    )
    gap = ask(norm.gap, g, ask(norm.dualize, g))
    np.testing.assert_allclose(gap, 1e-2 / 3.01, rtol=1e-4)


def test_gap_bounds_unconverged_method(rng):
    """Muon's five steps leave singular values between 0.7 and 1.2."""
    norm, g = Spectral(NewtonSchulz(MUON)), normal(rng, 6, 4)
    direction = ask(norm.dualize, g)
    loss = 1 - np.sum(np.float64(g) * np.float64(direction)) / singular_values(g).sum()
    gap = float(ask(norm.gap, g, direction))
    assert max(loss, 0.01) <= gap < 0.6


def test_gap_for_uniformly_short_singular_values(rng):
    """If all singular values are 0.7, the gap is 0.42 for a loss of 0.3, as documented."""
    g = polar(normal(rng, 5, 3)).astype(np.float32)
    np.testing.assert_allclose(ask(Spectral().gap, g, 0.7 * g), 0.51 / 1.21, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 0), (2, 0, 3)])
@pytest.mark.parametrize("norm", [Frobenius(), MaxAbs(), RMSToRMS(), L1ToRMS()])
def test_empty_weights_keep_shape(norm, shape):
    empty = jnp.zeros(shape)
    assert ask(norm.dualize, empty).shape == shape
    for size in (ask(norm.norm, empty), ask(norm.dual_norm, empty), ask(norm.gap, empty, empty)):
        np.testing.assert_array_equal(size, np.zeros(shape[:-2]))


@pytest.mark.parametrize("case", [c for c in NORMS if c.norm.ndim > 0], ids=lambda c: c.name)
def test_too_few_axes_raise(case):
    x = jax.ShapeDtypeStruct(case.shape[-case.norm.ndim :][1:], jnp.float32)
    for method in (case.norm.norm, case.norm.dual_norm, case.norm.dualize):
        with pytest.raises((ValueError, TypeError), match="ax|shape|Type-check"):
            jax.eval_shape(method, x)


def test_equal_norms_hash_equal():
    assert len({Frobenius(), Frobenius(ndim=2), Spectral(), Spectral(None), RMSToRMS()}) == 3


@pytest.mark.parametrize(
    ("norm", "plain", "scale"),
    [
        (Spectral(scale=3.0), Spectral(), 3.0),
        (Spectral(scale=FanRatio(0.5)), Spectral(), 0.5 * np.sqrt(6 / 4)),
        (Frobenius(scale=0.25), Frobenius(), 0.25),
        (Frobenius(1, RootDim()), Frobenius(1), 2.0),
        (MaxRowNorm(2.0), MaxRowNorm(), 2.0),
    ],
    ids=str,
)
def test_scale_is_size_at_norm_one(rng, norm, plain, scale):
    """The scale divides the norm, and multiplies the dual norm and the duality map."""
    g = normal(rng, 6, 4)
    np.testing.assert_allclose(ask(norm.norm, g), ask(plain.norm, g) / scale, rtol=1e-6)
    np.testing.assert_allclose(ask(norm.dual_norm, g), ask(plain.dual_norm, g) * scale, rtol=1e-6)
    expected = scale * ask(plain.dualize, g)
    np.testing.assert_allclose(ask(norm.dualize, g), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [Frobenius(), MaxRowNorm(threshold=0.0)], ids=str)
def test_projection_of_huge_weights_has_norm_one(rng, norm):
    """Compiled division multiplies by an inverse, which is denormal from 8.5e37 on."""
    weight = np.float32(2e38) * np.sign(normal(rng, 3, 4))
    found = np.float64(ask(norm.project, weight))
    np.testing.assert_allclose(ask(norm.norm, np.float32(found)), 1, rtol=1e-6)
    assert (found * weight > 0).all()
