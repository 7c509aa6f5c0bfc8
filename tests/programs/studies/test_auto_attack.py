"""Auto-PGD on known problems: linear models, orthonormal layers, discs in a plane."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from manifoldmuon.robustness import AttackResult
from manifoldmuon.robustness._attacks import _nearest
from studies.auto_attack import auto_attack, checkpoints, nearest
from tests.robustness.attacked import (
    LAWS,
    apply,
    in_the_plane,
    linear_models_break_at_their_radius,
    lipschitz_network,
    on_images,
    small_network,
    wide,
)

KEY = jax.random.key(7)


def attack(*args: Any, **options: Any) -> AttackResult:
    return auto_attack(*args, key=KEY, steps=25, **options)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_auto_attack_satisfies_attack_laws(law):
    law(attack)


def test_targets_try_every_class_boundary():
    linear_models_break_at_their_radius(attack, classes=5)


def test_attack_finds_nearly_all_label_changes():
    """Against the labels on a fine grid in each disc."""
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


def test_results_depend_only_on_key():
    weights, x = lipschitz_network()
    labels, f = np.argmax(apply(weights, x), axis=1), Partial(apply, weights)
    runs = [attack(f, x, labels, 0.3, batch=size) for size in (40, 40, 7)]
    np.testing.assert_array_equal(runs[0].points, runs[1].points)
    np.testing.assert_allclose(runs[0].points, runs[2].points, atol=1e-4)
    np.testing.assert_array_equal(runs[0].robust, runs[2].robust)
    images = attack(Partial(on_images, weights), x.reshape(-1, 2, 3, 2), labels, 0.3)
    np.testing.assert_allclose(images.points.reshape(x.shape), runs[0].points, atol=1e-4)
    other = auto_attack(f, x, labels, 0.3, key=jax.random.key(8), steps=25)
    assert np.abs(other.points - runs[0].points).max() > 1e-3


def test_nonfinite_logits_during_attack_raise():
    def f(x):
        return jnp.stack([x[:, 0], 2 - x[:, 0], jnp.where(x[:, 1] == 0, 0, jnp.nan)], axis=1)

    x, labels = np.tile(np.array([2, 0], np.float32), (1500, 1)), np.zeros(1500, int)
    assert np.isfinite(f(x)).all()
    with pytest.raises(ValueError, match="not finite near 1500 images, such as number 0"):
        attack(f, x, labels, 0.5, batch=1500)


def test_step_checkpoints_match_paper():
    """Croce and Hein 2020, section 3.1; values in percent of the steps."""
    windows = checkpoints(100)
    ends = np.flatnonzero(windows) + 1
    assert ends.tolist() == [22, 41, 57, 70, 80, 87, 93, 99]
    np.testing.assert_array_equal(np.cumsum(windows[ends - 1]), ends)
    for steps in (1, 2, 7):
        assert np.sum(checkpoints(steps)) <= steps


def test_projection_matches_package():
    rng = np.random.default_rng(6)
    x, move = rng.random((8, 2, 3)), 2 * rng.standard_normal((8, 2, 3))
    limits = np.zeros((2, 3)), np.ones((2, 3))
    given = jnp.asarray(x), jnp.asarray(move), jnp.asarray(rng.uniform(0.1, 1.5, 8))
    for box in (limits, None):
        expected = _nearest(*given, box)
        np.testing.assert_allclose(nearest(*given, box), expected, atol=1e-6)
