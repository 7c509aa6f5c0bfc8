"""The margin loss against another formula, by NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.robustness import margin_cross_entropy
from tests.compiled import ask


def cross_entropy(logits, labels, offset, temperature):
    """Compute losses from probabilities."""
    scores = np.asarray(logits, np.float64) - offset * np.eye(logits.shape[1])[labels]
    own = np.take_along_axis(scores, np.asarray(labels)[:, None], axis=1)
    return np.log(np.sum(np.exp((scores - own) / temperature), axis=1))


loss = jax.jit(margin_cross_entropy)
GIVEN = (2.234, 0.25)


def drawn(seed: int, n: int = 20, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, classes)).astype(np.float32), rng.integers(classes, size=n)


@pytest.mark.parametrize("given", [GIVEN, (0.0, 1.0)])
def test_losses_and_gradients_match_numpy(given):
    logits, labels = drawn(0)
    wanted = cross_entropy(logits, labels, *given)
    np.testing.assert_allclose(loss(logits, labels, *given), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        margin_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), *given), wanted, rtol=1e-5
    )
    found = ask(jax.grad(lambda z: jnp.sum(loss(z, labels, *given))), logits)
    z, width = np.asarray(logits, np.float64), 1e-6
    slopes = np.zeros_like(z)
    for i in range(z.shape[1]):
        step = width * np.eye(z.shape[1])[i]
        ends = (cross_entropy(z + sign * step, labels, *given) for sign in (1, -1))
        slopes[:, i] = np.subtract(*ends) / (2 * width)
    np.testing.assert_allclose(found, slopes, rtol=1e-3, atol=1e-5)


def test_batch_shapes_give_equal_losses():
    logits, labels = drawn(1)
    wanted = np.asarray(loss(logits, labels, *GIVEN))
    folded = loss(logits.reshape(4, 5, 5), labels.reshape(4, 5), *GIVEN)
    np.testing.assert_allclose(folded, wanted.reshape(4, 5), rtol=1e-6)
    np.testing.assert_allclose(loss(logits[3], labels[3], *GIVEN), wanted[3], rtol=1e-6)
    mapped = ask(jax.vmap(lambda z, y: loss(z, y, *GIVEN)), logits, labels)
    np.testing.assert_allclose(mapped, wanted, rtol=1e-6)


def test_large_logits_have_finite_losses_and_gradients():
    logits, labels = jnp.array([[1e30, -1e30, 0.0], [-1e4, 1e4, 0.0]]), jnp.array([0, 0])
    losses = np.asarray(loss(logits, labels, *GIVEN))
    slopes = ask(jax.grad(lambda z: jnp.sum(loss(z, labels, *GIVEN))), logits)
    assert losses[0] == 0
    assert 1e3 < losses[1] < np.inf
    assert np.isfinite(slopes).all()
    assert slopes[1, 0] < 0 < slopes[1, 1]


def test_offset_is_the_logit_margin():
    """If the label leads by exactly the offset, all classes are equally likely."""
    logits, labels = jnp.array([[3.0, 1.0, 1.0]]), jnp.array([0])
    np.testing.assert_allclose(margin_cross_entropy(logits, labels, 2.0, 0.3), np.log(3), rtol=1e-6)


def test_losses_promote_to_float32_and_support_float64():
    logits, labels = drawn(2)
    short = logits.astype(jnp.bfloat16)
    found = loss(short, labels.astype(jnp.int8), *GIVEN)
    assert found.dtype == jnp.float32
    wanted = cross_entropy(short, labels, *GIVEN)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        z = np.random.default_rng(0).standard_normal((20, 5))
        wanted = cross_entropy(z, labels, *GIVEN)
        np.testing.assert_allclose(loss(z, labels, *GIVEN), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("label", "classes"), [(-1, 5), (5, 5), (-1, 256)])
def test_invalid_label_gives_nan(label, classes):
    """In `int8` the class 255 would be -1."""
    logits, labels = drawn(3)
    logits = np.pad(logits, ((0, 0), (0, classes - 5)))
    labels = labels.astype(np.int8)
    labels[2] = label
    assert np.flatnonzero(np.isnan(loss(logits, labels, *GIVEN))).tolist() == [2]
