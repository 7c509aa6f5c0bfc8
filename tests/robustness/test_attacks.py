"""Projected gradient attacks in l2, on models with known robustness."""

from typing import Any

import cvxpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from manifoldmuon.robustness import AttackResult, pgd
from manifoldmuon.robustness._attacks import _nearest as nearest
from tests.robustness.attacked import (
    LAWS,
    apply,
    exact_radii,
    lengths,
    linear,
    lipschitz_network,
    on_images,
    wide,
)

KEY = jax.random.key(7)


def attack(*args: Any, **options: Any) -> AttackResult:
    return pgd(*args, key=KEY, steps=20, restarts=2, **options)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_pgd_keeps_attack_laws(law):
    law(attack)


def test_pgd_finds_exact_radii_in_float64():
    with jax.enable_x64(True):
        weights, x, labels = linear(2, np.float64)
        radii, f = exact_radii(weights, x, labels), Partial(lambda w, x: x @ w.T, weights)
        for factor, robust in ((1 - 1e-8, 27), (1 + 1e-8, 0)):
            found = attack(f, x, labels, np.maximum(factor * radii, 0))
            assert found.points.dtype == np.float64
            assert np.sum(found.robust) == robust


def test_projection_is_nearest_point_of_ball_and_box():
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


def test_results_depend_only_on_key():
    weights, x = lipschitz_network()
    labels, f = np.argmax(apply(weights, x), axis=1), Partial(apply, weights)
    runs = [attack(f, x, labels, 0.3, batch=size) for size in (40, 40, 7)]
    np.testing.assert_array_equal(runs[0].points, runs[1].points)
    np.testing.assert_allclose(runs[0].points, runs[2].points, atol=1e-4)
    np.testing.assert_array_equal(runs[0].robust, runs[2].robust)
    images = attack(Partial(on_images, weights), x.reshape(-1, 2, 3, 2), labels, 0.3)
    np.testing.assert_allclose(images.points.reshape(x.shape), runs[0].points, atol=1e-4)
    other = pgd(f, x, labels, 0.3, key=jax.random.key(8), steps=20, restarts=2)
    assert np.abs(other.points - runs[0].points).max() > 1e-3


def test_new_weights_do_not_recompile():
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


def test_radius_zero_gives_clean_accuracy():
    weights, x, labels = linear(4)
    found = pgd(lambda x: x @ weights.T, x, labels, 0.0, key=KEY)
    assert found.accuracy == 27 / 30
    np.testing.assert_array_equal(found.points, x)


def test_non_finite_gradient_raises():
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
        ({"steps": 0}, ValueError, "steps must be a whole number in [1, inf); got 0"),
        ({"batch": 0}, ValueError, "batch must be a whole number in [1, inf); got 0"),
        ({"f": lambda x: x[:, 0]}, ValueError, "f must give logits (n, classes)"),
        ({"f": lambda x: x / 0}, ValueError, "f gives logits that are not finite"),
    ],
)
def test_invalid_arguments_raise(changes, error, message):
    given = {
        "f": lambda x: x,
        "x": np.zeros((3, 2), np.float32),
        "labels": np.array([0, 1, 0]),
        "radius": 0.1,
        "key": KEY,
    }
    with pytest.raises(error) as caught:
        pgd(**(given | changes))
    assert str(caught.value).startswith("pgd: ")
    assert message in str(caught.value)
