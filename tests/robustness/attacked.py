"""Models with known robustness, and the laws of every l2 attack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from manifoldmuon.manifolds import Stiefel


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def lengths(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    away = wide(points) - wide(x)
    return np.linalg.norm(away.reshape(len(away), -1), axis=1)


def linear(classes: int, dtype: Any = np.float32):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((classes, 12)).astype(dtype)
    x = rng.random((30, 12)).astype(dtype)
    labels = np.argmax(wide(x) @ wide(weights).T, axis=1)
    labels[:3] = (labels[:3] + 1) % classes  # misclassified
    return weights, x, labels


def exact_radii(weights: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return each image's distance to its nearest decision boundary; negative if wrong."""
    w, radii = wide(weights), []
    for image, label in zip(wide(x), labels, strict=True):
        rivals = [i for i in range(len(w)) if i != label]
        margins = [(w[label] - w[i]) @ image / np.linalg.norm(w[label] - w[i]) for i in rivals]
        radii.append(min(margins))
    return np.array(radii)


def lipschitz_network() -> tuple[list[np.ndarray], np.ndarray]:
    """Return orthonormal layers, used with MaxMin between them: 1-Lipschitz by construction."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = ((16, 12), (16, 16), (5, 16))
    draw = Stiefel().random_point
    weights = [np.asarray(draw(k, s, jnp.float32)) for k, s in zip(keys, shapes, strict=True)]
    return weights, np.random.default_rng(1).random((40, 12)).astype(np.float32)


def apply(weights, x):
    for w in weights[:-1]:
        a, b = jnp.split(x @ w.T, 2, axis=-1)
        x = jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], axis=-1)
    return x @ weights[-1].T


def on_images(weights, images):
    return apply(weights, images.reshape(len(images), -1))


def linear_models_break_at_their_radius(attack, classes=2):
    weights, x, labels = linear(classes)
    radii, f = exact_radii(weights, x, labels), Partial(lambda w, x: x @ w.T, weights)
    for factor, robust in ((0.999, 27), (1.001, 0)):
        found = attack(f, x, labels, np.maximum(factor * radii, 0))
        assert np.sum(found.robust) == robust
        assert found.accuracy == robust / 30
        np.testing.assert_array_equal(found.points[:3], x[:3])
        assert (lengths(found.points, x) <= np.maximum(factor * radii, 0)).all()
        wrong = np.argmax(wide(found.points) @ wide(weights).T, axis=1) != labels
        np.testing.assert_array_equal(wrong, ~found.robust)


def float64_images_stay_float64_where_jax_computes_in_float32(attack):
    weights, x, _ = linear(2)
    # Images and bounds are not representable in float32.
    x = 0.1 + 0.8 * np.random.default_rng(7).random(x.shape)
    labels = np.argmax(x @ weights.T, axis=1)
    radii = 2 * exact_radii(weights, x, labels)
    f = Partial(lambda w, x: x @ w.T, weights)
    found = attack(f, x, labels, radii, bounds=(0.1, 0.9))
    assert found.points.dtype == np.float64
    moved = (found.points != x).any(axis=1)
    assert moved.any()
    assert (lengths(found.points, x) <= radii).all()
    assert found.points.min() >= 0.1
    assert found.points.max() <= 0.9
    still = attack(f, x, labels, 0.0)
    np.testing.assert_array_equal(still.points, x)


def nothing_breaks_within_its_certificate_and_much_beyond(attack):
    weights, x = lipschitz_network()
    f, logits = Partial(apply, weights), wide(apply(weights, x))
    labels = np.argmax(logits, axis=1)
    second, first = np.sort(logits, axis=1)[:, -2:].T
    certified = (first - second) / 2**0.5
    assert attack(f, x, labels, 0.9999 * certified).accuracy == 1
    assert attack(f, x, labels, 2.5 * certified).accuracy < 0.2


def points_stay_in_the_ball_and_in_the_box(attack):
    weights, x = lipschitz_network()
    x = np.where(np.random.default_rng(0).random(x.shape) < 0.5, np.round(x), x)  # at the edges
    low, high = np.linspace(-0.2, 0.0, 12), 1.0
    labels = np.argmax(apply(weights, x), axis=1)
    for radius in (0.05, 0.7, 5.0):
        found = attack(Partial(apply, weights), x, labels, radius, bounds=(low, high))
        assert (lengths(found.points, x) <= radius).all()
        assert (found.points >= np.float32(low)).all()
        assert (found.points <= high).all()
    assert not found.robust.all()


def sure_networks_do_not_blind_the_attack(attack):
    """For logits in the thousands, the float32 gradient of the cross-entropy vanishes."""
    weights, x = lipschitz_network()
    labels = np.argmax(apply(weights, x), axis=1)
    found = attack(Partial(apply, weights), x, labels, 0.5)
    assert 0.05 < found.accuracy < 0.95
    sure = [*weights[:-1], np.float32(2**12) * weights[-1]]
    again = attack(Partial(apply, sure), x, labels, 0.5)
    np.testing.assert_array_equal(again.points, found.points)


LAWS = [
    linear_models_break_at_their_radius,
    float64_images_stay_float64_where_jax_computes_in_float32,
    nothing_breaks_within_its_certificate_and_much_beyond,
    points_stay_in_the_ball_and_in_the_box,
    sure_networks_do_not_blind_the_attack,
]
