"""Measures of weight erasure, against scikit-learn, closed forms and NumPy's SVD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from manifoldmuon.lab import erasure_auc, letter_mask, stable_rank
from studies.reproduction.weight_erasure import erasure_ratio

MASK = letter_mask((96, 128))


def weights(rng, shape=(96, 128)):
    return rng.standard_normal(shape).astype(np.float32)


def test_mask_is_centred_letter():
    assert MASK.shape == (96, 128)
    assert MASK.dtype == np.float32
    assert set(np.unique(MASK)) == {0.0, 1.0}
    rows, columns = np.nonzero(MASK == 0)
    assert rows.max() - rows.min() + 1 == pytest.approx(0.8 * 96, abs=2)
    assert rows.min() + rows.max() == pytest.approx(95, abs=2)
    assert columns.min() + columns.max() == pytest.approx(127, abs=2)
    # An "a" has a closed bowl: some row below the middle has ink, a hole, and ink again.
    below = MASK[rows.min() + 48 : rows.max() - 8] == 0
    assert any(np.count_nonzero(np.diff(row.astype(int)) == 1) == 2 for row in below)
    assert (MASK[0] == 1).all()


def test_masks_scale_with_size():
    share = [np.mean(letter_mask((n, n)) == 0) for n in (128, 1024)]
    assert share[0] == pytest.approx(share[1], abs=0.03)
    with pytest.raises(ValueError, match="must have two positive lengths"):
        letter_mask((0, 4))


@pytest.mark.parametrize("decimals", [8, 1, 0])  # with few and with many ties
@pytest.mark.parametrize("factor", [1, 0.5 + 0.5 * MASK, MASK, 1 - MASK], ids=range(4))
def test_auc_matches_scikit_learn(rng, factor, decimals):
    weight = np.round(weights(rng) * factor, decimals)
    expected = roc_auc_score(MASK.ravel() != 0, np.abs(weight).ravel())
    for scale in (1, 1j, 1e-20):
        assert erasure_auc(scale * weight, MASK) == pytest.approx(expected, abs=1e-12)


def test_auc_of_integers_takes_the_smallest_for_large():
    assert erasure_auc(np.where(MASK == 0, 1, -128).astype(np.int8), MASK) == 1.0


def test_erasure_ratio_matches_masked_scale(rng):
    signs = np.sign(weights(rng))
    assert erasure_ratio(signs * np.where(MASK == 0, 0.25, 2.0), MASK) == pytest.approx(0.125)
    assert erasure_ratio(weights(rng) * MASK, MASK) == 0
    assert np.isnan(erasure_ratio(np.zeros_like(MASK), MASK))


def test_measures_reject_mismatched_masks(rng):
    with pytest.raises(ValueError, match="shape"):
        erasure_auc(weights(rng, (4, 4)), MASK)
    with pytest.raises(ValueError, match="letter_mask"):
        erasure_auc(weights(rng), np.ones_like(MASK))


def test_stable_rank_matches_singular_values(rng):
    values = np.array([3.0, 2.0, 1.0, 0.5], np.float32)
    left, right = (np.linalg.qr(rng.standard_normal((n, 4)))[0] for n in (9, 6))
    matrix = ((left * values) @ right.T).astype(np.float32)
    stack = np.stack([matrix, 1e-20 * matrix, left @ right.T, np.zeros((9, 6))]).astype(np.float32)
    expected = [np.sum(values**2) / 9, np.sum(values**2) / 9, 4.0, 0.0]
    found = jax.jit(stable_rank)(jnp.asarray(stack))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    column = np.outer(np.arange(5.0), np.ones(3)).astype(np.float32)
    assert float(jax.jit(stable_rank)(jnp.asarray(column))) == pytest.approx(1.0, abs=1e-5)
