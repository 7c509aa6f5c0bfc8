"""Margin losses against other formulas, by NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.robustness import margin_cross_entropy, multiclass_hinge
from tests.compiled import ask


def cross_entropy(logits, labels, offset, temperature):
    """Compute losses from probabilities, one example at a time."""
    losses = []
    for scores, label in zip(np.asarray(logits, np.float64), labels, strict=True):
        moved = scores.copy()
        moved[label] -= offset
        odds = np.exp((moved - moved[label]) / temperature)
        losses.append(np.log(np.sum(odds)))
    return np.array(losses)


def hinge(logits, labels, margin):
    losses = []
    for scores, label in zip(np.asarray(logits, np.float64), labels, strict=True):
        others = [s for i, s in enumerate(scores) if i != label]
        losses.append(sum(max(0.0, margin - scores[label] + s) for s in others) / len(scores))
    return np.array(losses)


CASES = {
    "cross-entropy": (
        jax.jit(lambda z, y: margin_cross_entropy(z, y, 2.234, 0.25)),
        lambda z, y: cross_entropy(z, y, 2.234, 0.25),
    ),
    "plain": (
        jax.jit(lambda z, y: margin_cross_entropy(z, y, 0, 1)),
        lambda z, y: cross_entropy(z, y, 0, 1),
    ),
    "hinge": (jax.jit(lambda z, y: multiclass_hinge(z, y, 1.5)), lambda z, y: hinge(z, y, 1.5)),
}


def drawn(seed: int, n: int = 20, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, classes)).astype(np.float32), rng.integers(classes, size=n)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_numpy(name):
    ours, other = CASES[name]
    logits, labels = drawn(0)
    np.testing.assert_allclose(ours(logits, labels), other(logits, labels), rtol=1e-5, atol=1e-6)
    found = ask(jax.grad(lambda z: jnp.sum(ours(z, labels))), logits)
    z, width = np.asarray(logits, np.float64), 1e-6
    wanted = np.zeros_like(z)
    for i in range(z.shape[1]):
        step = width * np.eye(z.shape[1])[i]
        wanted[:, i] = (other(z + step, labels) - other(z - step, labels)) / (2 * width)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_batch_shapes_give_equal_losses(name):
    ours, _ = CASES[name]
    logits, labels = drawn(1)
    wanted = np.asarray(ours(logits, labels))
    folded = ours(logits.reshape(4, 5, 5), labels.reshape(4, 5))
    np.testing.assert_allclose(folded, wanted.reshape(4, 5), rtol=1e-6)
    np.testing.assert_allclose(ours(logits[3], labels[3]), wanted[3], rtol=1e-6)
    np.testing.assert_allclose(ask(jax.vmap(ours), logits, labels), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_large_logits_have_finite_losses_and_gradients(name):
    ours, _ = CASES[name]
    logits, labels = jnp.array([[1e30, -1e30, 0.0], [-1e4, 1e4, 0.0]]), jnp.array([0, 0])
    losses = np.asarray(ours(logits, labels))
    slopes = ask(jax.grad(lambda z: jnp.sum(ours(z, labels))), logits)
    assert losses[0] == 0
    assert np.isfinite(losses).all()
    assert np.isfinite(slopes).all()
    assert losses[1] > 1e3
    assert slopes[1, 0] < 0 < slopes[1, 1]


def test_offset_is_the_logit_margin():
    """If the label leads by exactly the offset, all classes are equally likely."""
    logits, labels = jnp.array([[3.0, 1.0, 1.0]]), jnp.array([0])
    np.testing.assert_allclose(margin_cross_entropy(logits, labels, 2.0, 0.3), np.log(3), rtol=1e-6)
    assert multiclass_hinge(logits, labels, 2.0) == 0
    assert multiclass_hinge(logits, labels, 2.3) == pytest.approx(0.2)


def test_losses_promote_to_float32_and_support_float64():
    logits, labels = drawn(2)
    for ours, other in CASES.values():
        short = logits.astype(jnp.bfloat16)
        found = ours(short, labels.astype(jnp.int8))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, other(short, labels), rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        for ours, other in CASES.values():
            z = np.random.default_rng(0).standard_normal((20, 5))
            np.testing.assert_allclose(ours(z, labels), other(z, labels), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("label", [-1, 5])
@pytest.mark.parametrize("name", CASES)
def test_invalid_label_gives_nan(name, label):
    ours, _ = CASES[name]
    logits, labels = drawn(3)
    labels[2] = label
    losses = ours(logits, labels)
    assert np.flatnonzero(np.isnan(losses)).tolist() == [2]


def test_offset_and_temperature_may_be_traced():
    logits, labels = drawn(4)
    found = jax.jit(margin_cross_entropy)(logits, labels, 1.0, 0.5)
    plain = margin_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), 1.0, 0.5)
    np.testing.assert_allclose(found, plain, rtol=1e-6)
