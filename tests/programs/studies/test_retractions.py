"""The retraction laboratory: distances, baselines, a small run, and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from manifoldmuon.manifolds.retractions import Normalize, Polar
from studies import run_study
from studies.retractions.spaces import MATRIX, SPACES, SPHERE, Analytic, Scalar
from studies.retractions.study import RetractionLaboratory

pytestmark = pytest.mark.slow


def test_distances_match_known_values():
    stiefel, rows = SPACES["Stiefel"], SPACES["rows"]
    points = np.stack([np.eye(2), np.diag([1.0, 1.5])])
    np.testing.assert_allclose(stiefel.distance(points), [0, 0.5], atol=1e-12)
    np.testing.assert_allclose(rows.distance(np.array([[3.0, 4.0], [0.0, 1.0]])), 4)
    assert np.isnan(stiefel.distance(np.full((2, 2), np.inf)))


def test_scalar_retraction_needs_equal_singular_values():
    rng = np.random.default_rng(0)
    w = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    a = np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]])  # skew and orthogonal
    full, half = 0.3 * w @ a, 0.3 * w @ (a * [1, 1, 0, 0])
    for vector, right in ((full, True), (half, False)):
        moved = Scalar().retract(jnp.float32(w), jnp.float32(vector))
        distance = SPACES["orthogonal"].distance(np.asarray(moved))
        assert distance < 1e-5 if right else distance > 0.01


def test_analytic_retraction_equals_polar_for_partial_isometries():
    """For other directions it misses the set by O(eta^4)."""
    rng = np.random.default_rng(1)
    w = np.linalg.qr(rng.standard_normal((8, 3)))[0]
    turn = w @ np.array([[0, -1, 0], [1, 0, 0], [0, 0, 0]])
    moved = Analytic().retract(jnp.float32(w), jnp.float32(0.7 * turn))
    np.testing.assert_allclose(moved, scipy.linalg.polar(w + 0.7 * turn)[0], atol=5e-7)
    other = turn + 0.5 * np.linalg.qr(np.hstack([w, rng.standard_normal((8, 3))]))[0][:, 3:]
    with jax.enable_x64(True):
        moved = [Analytic().retract(jnp.asarray(w), jnp.asarray(eta * other)) for eta in (0.2, 0.1)]
    misses = [SPACES["Stiefel"].distance(np.asarray(x)) for x in moved]
    assert misses[1] > 1e-6
    assert 3.8 < np.log2(misses[0] / misses[1]) < 4.2


def test_first_retraction_is_default():
    assert MATRIX["polar"] == Polar()
    assert SPHERE["normalize"] == Normalize()
    for space in SPACES.values():
        name = next(iter(space.retractions))
        manifold = space.build(space.retractions[name], space.shape)
        assert getattr(manifold, "retraction", None) == space.retractions[name]


def test_study_runs_on_one_manifold(tmp_path, monkeypatch):
    monkeypatch.setitem(SPACES, "rows", dataclasses.replace(SPACES["rows"], widths=()))
    study = RetractionLaboratory(
        manifolds=("rows",), retractions=("normalize", "none"), dtypes=("float32",),
        parts=("walk", "training"), rates=(0.5,), walk_steps=3, train_steps=3, seeds=(0, 1),
    )  # fmt: skip
    record = run_study(study, tmp_path / "record.json")
    kept, left = record["summary"]["rows"].values()
    same = kept["training"]["float32"]["0.5"]["ratio"]
    assert same == {"value": 1.0, "interval": [1.0, 1.0]}
    assert left["walk"]["float32"]["last_step"][0] > 0.1
    for row in record["rows"]:
        if row["part"] == "training" and row["retraction"] == "normalize":
            np.testing.assert_allclose(row["loss"], row["loss_on_the_set"], rtol=1e-4)
