"""The attack of the study, on models with known robustness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from manifoldmuon.manifolds import Stiefel
from studies.attacks import pgd

pytestmark = pytest.mark.slow

WRONG = 3  # misclassified images of `linear`


def linear():
    """Return weights for two classes, images, labels, and distances to the boundary."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((2, 12)), rng.random((30, 12))
    labels = np.argmax(x @ w.T, axis=1)
    labels[:WRONG] = 1 - labels[:WRONG]
    apart = w[labels] - w[1 - labels]
    radii = np.sum(apart * x, axis=1) / np.linalg.norm(apart, axis=1)
    return np.float32(w), np.float32(x), labels, radii


def network():
    """Return a 1-Lipschitz network: orthonormal layers with MaxMin between them; and its images."""
    shapes = enumerate([(16, 12), (16, 16), (5, 16)])
    weights = [Stiefel().random_point(jax.random.key(i), shape, jnp.float32) for i, shape in shapes]
    return weights, np.random.default_rng(1).random((40, 12)).astype(np.float32)


def apply(weights, x):
    for w in weights[:-1]:
        a, b = jnp.split(x @ w.T, 2, axis=-1)
        x = jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], axis=-1)
    return x @ weights[-1].T


def lengths(points, x):
    return np.linalg.norm(np.asarray(points, np.float64) - x, axis=1)


def test_linear_models_break_at_their_radius():
    w, x, labels, radii = linear()
    f = Partial(lambda w, x: x @ w.T, w)
    for factor, robust in ((0.999, 30 - WRONG), (1.001, 0)):
        reach = np.maximum(factor * radii, 0)
        points, found = pgd(f, x, labels, reach)
        assert np.sum(found) == robust
        assert np.all(lengths(points, x) <= reach)
        wrong = np.argmax(np.asarray(points, np.float64) @ w.T, axis=1) != labels
        np.testing.assert_array_equal(wrong, ~np.asarray(found))


def test_nothing_breaks_within_its_radius_and_much_beyond():
    weights, x = network()
    f, logits = Partial(apply, weights), np.asarray(apply(weights, x))
    labels = np.argmax(logits, axis=1)
    second, first = np.sort(logits, axis=1)[:, -2:].T
    radii = (first - second) / np.sqrt(2)
    assert np.all(pgd(f, x, labels, 0.9999 * radii)[1])
    points, robust = pgd(f, x, labels, 2.5 * radii)
    assert np.mean(robust) < 0.2
    assert np.all(lengths(points, x) <= 2.5 * radii)


def test_large_logits_do_not_blind_the_attack():
    """For logits in the thousands, the float32 gradient of the cross-entropy vanishes."""
    weights, x = network()
    labels = np.argmax(apply(weights, x), axis=1)
    points, robust = pgd(Partial(apply, weights), x, labels, 0.5)
    assert 0.05 < np.mean(robust) < 0.95
    large = [*weights[:-1], np.float32(2**12) * weights[-1]]
    np.testing.assert_array_equal(pgd(Partial(apply, large), x, labels, 0.5)[0], points)


def test_nan_gradient_counts_as_broken():
    f = Partial(lambda x: jnp.stack([jnp.sqrt(jnp.sum((x - 1) ** 2, -1)), x[:, 0] - 3], -1))
    x = np.array([[1, 1, 1], [0, 1, 1]], np.float32)
    assert pgd(f, x, np.zeros(2, int), 0.1)[1].tolist() == [False, True]
