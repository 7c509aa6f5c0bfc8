"""Attacks in l2 where the answer is known: linear models, orthonormal layers, discs in a plane."""

from typing import Any

import cvxpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.robustness import auto_attack, pgd
from manifoldmuon.robustness._climbs import checkpoints, nearest

KEY = jax.random.key(7)
ATTACKS = {
    "pgd": lambda *args, **options: pgd(*args, key=KEY, steps=20, restarts=2, **options),
    "auto": lambda *args, **options: auto_attack(*args, key=KEY, steps=25, **options),
}


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
    labels[:3] = (labels[:3] + 1) % classes  # wrong to begin with
    return weights, x, labels


def exact_radii(weights: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How far each image is from the nearest plane between its label and another class."""
    w, radii = wide(weights), []
    for image, label in zip(wide(x), labels, strict=True):
        rivals = [i for i in range(len(w)) if i != label]
        margins = [(w[label] - w[i]) @ image / np.linalg.norm(w[label] - w[i]) for i in rivals]
        radii.append(min(margins))
    return np.array(radii)


# Only targets try every plane: without, the climb is towards whichever it meets first.
@pytest.mark.parametrize(("name", "classes"), [("pgd", 2), ("auto", 2), ("auto", 5)])
def test_linear_models_break_at_their_radius(name, classes):
    weights, x, labels = linear(classes)
    radii, f = exact_radii(weights, x, labels), Partial(lambda w, x: x @ w.T, weights)
    for factor, robust in ((0.999, 27), (1.001, 0)):
        found = ATTACKS[name](f, x, labels, np.maximum(factor * radii, 0))
        assert np.sum(found.robust) == robust
        assert found.accuracy == robust / 30
        np.testing.assert_array_equal(found.points[:3], x[:3])
        assert (lengths(found.points, x) <= np.maximum(factor * radii, 0)).all()
        wrong = np.argmax(wide(found.points) @ wide(weights).T, axis=1) != labels
        np.testing.assert_array_equal(wrong, ~found.robust)


def test_linear_models_in_float64():
    with jax.enable_x64(True):
        weights, x, labels = linear(2, np.float64)
        radii, f = exact_radii(weights, x, labels), Partial(lambda w, x: x @ w.T, weights)
        for factor, robust in ((1 - 1e-8, 27), (1 + 1e-8, 0)):
            found = ATTACKS["pgd"](f, x, labels, np.maximum(factor * radii, 0))
            assert found.points.dtype == np.float64
            assert np.sum(found.robust) == robust


@pytest.mark.parametrize("name", ["pgd", "auto"])
def test_float64_images_stay_float64_where_jax_computes_in_float32(name):
    weights, x, _ = linear(2)
    # No numbers of float32, and neither are the bounds.
    x = 0.1 + 0.8 * np.random.default_rng(7).random(x.shape)
    labels = np.argmax(x @ weights.T, axis=1)
    radii = 2 * exact_radii(weights, x, labels)
    f = Partial(lambda w, x: x @ w.T, weights)
    found = ATTACKS[name](f, x, labels, radii, bounds=(0.1, 0.9))
    assert found.points.dtype == np.float64
    moved = (found.points != x).any(axis=1)
    assert moved.any()
    assert (lengths(found.points, x) <= radii).all()
    assert found.points.min() >= 0.1
    assert found.points.max() <= 0.9
    still = ATTACKS[name](f, x, labels, 0.0)
    np.testing.assert_array_equal(still.points, x)


def lipschitz_network() -> tuple[list[np.ndarray], np.ndarray]:
    """Orthonormal layers with MaxMin between them: 1-Lipschitz by construction."""
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


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_breaks_within_its_certificate_and_much_beyond(name):
    weights, x = lipschitz_network()
    f, logits = Partial(apply, weights), wide(apply(weights, x))
    labels = np.argmax(logits, axis=1)
    second, first = np.sort(logits, axis=1)[:, -2:].T
    certified = (first - second) / 2**0.5
    assert ATTACKS[name](f, x, labels, 0.9999 * certified).accuracy == 1
    assert ATTACKS[name](f, x, labels, 2.5 * certified).accuracy < 0.2


def small_network(x_scale: float = 3.0):
    """A rugged function of the plane: four classes, tanh."""
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((2, 24)), rng.standard_normal((24, 4))
    shift, points = rng.uniform(-6, 6, 24), rng.uniform(-1, 1, (50, 2))
    arrays = (x_scale * first, shift, second)
    return tuple(a.astype(np.float32) for a in arrays), points.astype(np.float32)


def in_the_plane(weights, x):
    first, shift, second = weights
    return jnp.tanh(x @ first + shift) @ second


def test_in_the_plane_little_escapes():
    """Against the labels of all points of a fine grid in each disc."""
    weights, x = small_network()
    first, shift, second = (wide(w) for w in weights)

    def labels_of(points):
        return np.argmax(np.tanh(points @ first + shift) @ second, axis=-1)

    labels, radius = labels_of(x), 0.3
    side = np.linspace(-radius, radius, 121)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    grid = grid[np.linalg.norm(grid, axis=1) <= radius]
    changes = (labels_of(x[:, None] + grid) != labels[:, None]).any(axis=1)
    assert 10 < np.sum(changes) < 45
    f = Partial(in_the_plane, weights)
    found = auto_attack(f, x, labels, radius, key=KEY, steps=40, restarts=2)
    assert (labels_of(wide(found.points)) != labels)[~found.robust].all()
    assert np.sum(changes & found.robust) <= 1
    noise = np.random.default_rng(0).standard_normal((len(x), 12, 2))
    noise *= radius / np.linalg.norm(noise, axis=-1, keepdims=True)
    random = (labels_of(x[:, None] + noise[:, :1]) != labels[:, None]).any(axis=1)
    assert np.sum(random) < 0.7 * np.sum(~found.robust)


@pytest.mark.parametrize("name", ATTACKS)
def test_points_stay_in_the_ball_and_in_the_box(name):
    weights, x = lipschitz_network()
    x = np.where(np.random.default_rng(0).random(x.shape) < 0.5, np.round(x), x)  # at the edges
    low, high = np.linspace(-0.2, 0.0, 12), 1.0
    labels = np.argmax(apply(weights, x), axis=1)
    for radius in (0.05, 0.7, 5.0):
        found = ATTACKS[name](Partial(apply, weights), x, labels, radius, bounds=(low, high))
        assert (lengths(found.points, x) <= radius).all()
        assert (found.points >= np.float32(low)).all()
        assert (found.points <= high).all()
    assert not found.robust.all()


def test_the_projection_is_the_nearest_point_of_ball_and_box():
    rng = np.random.default_rng(5)
    x = rng.random((8, 6))
    x[:, :2] = np.round(x[:, :2])
    move, reach = 2 * rng.standard_normal((8, 6)), rng.uniform(0.1, 1.5, 8)
    with jax.enable_x64(True):
        given = jnp.asarray(x), jnp.asarray(move), jnp.asarray(reach)
        found = nearest(*given, (np.zeros(6), np.ones(6)))
        free = nearest(*given, None)
    for k in range(8):
        y = cvxpy.Variable(6)
        within = [cvxpy.norm(y - x[k]) <= reach[k]]
        goal = cvxpy.Minimize(cvxpy.sum_squares(y - x[k] - move[k]))
        cvxpy.Problem(goal, [*within, y >= 0, y <= 1]).solve()
        np.testing.assert_allclose(found[k], wide(y.value), atol=1e-4)
        cvxpy.Problem(goal, within).solve()
        np.testing.assert_allclose(free[k], wide(y.value), atol=1e-4)
    assert (lengths(wide(found), x) <= reach * (1 + 1e-12)).all()


def test_results_depend_on_the_key_alone():
    weights, x = lipschitz_network()
    labels, f = np.argmax(apply(weights, x), axis=1), Partial(apply, weights)
    runs = [ATTACKS["auto"](f, x, labels, 0.3, batch=size) for size in (40, 40, 7)]
    np.testing.assert_array_equal(runs[0].points, runs[1].points)
    np.testing.assert_allclose(runs[0].points, runs[2].points, atol=1e-4)
    np.testing.assert_array_equal(runs[0].robust, runs[2].robust)
    images = ATTACKS["auto"](Partial(on_images, weights), x.reshape(-1, 2, 3, 2), labels, 0.3)
    np.testing.assert_allclose(images.points.reshape(x.shape), runs[0].points, atol=1e-4)
    other = auto_attack(f, x, labels, 0.3, key=jax.random.key(8), steps=25)
    assert np.abs(other.points - runs[0].points).max() > 1e-3


@pytest.mark.parametrize("name", ATTACKS)
def test_sure_networks_do_not_blind_the_attack(name):
    """Cross-entropy of logits in the thousands has no gradient in float32."""
    weights, x = lipschitz_network()
    labels = np.argmax(apply(weights, x), axis=1)
    found = ATTACKS[name](Partial(apply, weights), x, labels, 0.5)
    assert 0.05 < found.accuracy < 0.95
    sure = [*weights[:-1], np.float32(2**12) * weights[-1]]
    again = ATTACKS[name](Partial(apply, sure), x, labels, 0.5)
    np.testing.assert_array_equal(again.points, found.points)


def test_other_weights_are_not_compiled_again():
    traces = []

    def f(weights, x):
        traces.append(x.shape)
        return apply(weights, x)

    weights, x = lipschitz_network()
    labels = np.argmax(apply(weights, x), axis=1)
    for scale in (1, 2):
        scaled = [w * scale for w in weights]
        for part in (slice(0, 20), slice(20, 40)):
            pgd(Partial(f, scaled), x[part], labels[part], 0.1, key=KEY, batch=10)
        if scale == 1:
            first = len(traces)
    assert len(traces) == first
    assert {shape[0] for shape in traces} == {10}


def test_no_ball_is_clean_accuracy():
    weights, x, labels = linear(4)
    found = pgd(lambda x: x @ weights.T, x, labels, 0.0, key=KEY)
    assert found.accuracy == 27 / 30
    np.testing.assert_array_equal(found.points, x)


def test_checkpoints_are_the_published_ones():
    """Croce and Hein 2020, section 3.1, in percent of the steps."""
    windows = checkpoints(100)
    ends = np.flatnonzero(windows) + 1
    assert ends.tolist() == [22, 41, 57, 70, 80, 87, 93, 99]
    np.testing.assert_array_equal(np.cumsum(windows[ends - 1]), ends)
    for steps in (1, 2, 7):
        assert np.sum(checkpoints(steps)) <= steps


def test_a_gradient_that_is_not_finite_is_an_error():
    def f(x):
        return jnp.stack([jnp.sqrt(jnp.sum((x - 1) ** 2, axis=-1)), jnp.ones(len(x)) - 2], axis=-1)

    with pytest.raises(ValueError, match="gradient of the logits is not finite near 1 images"):
        pgd(f, np.ones((1, 3), np.float32), np.zeros(1, int), 0.1, key=KEY)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"x": np.zeros((3, 2), np.uint8)},
            TypeError,
            "images must be float32 or float64; got uint8",
        ),
        (
            {"x": np.zeros(3, np.float32)},
            ValueError,
            "images (n, ...), one or more, go with labels",
        ),
        ({"labels": np.zeros(3)}, TypeError, "labels must be whole numbers; got float64"),
        ({"labels": np.array([0, 1, 2])}, ValueError, "labels must be from 0 to 1"),
        (
            {"labels": np.array([0, 1])},
            ValueError,
            "go with labels (n,); got shapes (3, 2) and (2,)",
        ),
        ({"radius": -1}, ValueError, "radius must be a finite number >= 0"),
        (
            {"radius": np.ones(2)},
            ValueError,
            "radius must be a finite number >= 0, or one for each",
        ),
        ({"bounds": (0.5, 1)}, ValueError, "6 of 6 entries of the images are not within bounds"),
        ({"steps": 0}, ValueError, "steps must be a whole number >= 1; got 0"),
        ({"batch": 0}, ValueError, "batch must be a whole number >= 1; got 0"),
        ({"f": lambda x: x[:, 0]}, ValueError, "f must give logits (n, classes)"),
        ({"f": lambda x: x / 0}, ValueError, "f gives logits that are not finite"),
    ],
)
@pytest.mark.parametrize("attack", [pgd, auto_attack])
def test_errors(attack, changes, error, message):
    given = {
        "f": lambda x: x,
        "x": np.zeros((3, 2), np.float32),
        "labels": np.array([0, 1, 0]),
        "radius": 0.1,
        "key": KEY,
    }
    with pytest.raises(error) as caught:
        attack(**(given | changes))
    assert str(caught.value).startswith(f"{attack.__name__}: ")
    assert message in str(caught.value)
