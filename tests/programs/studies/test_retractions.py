"""The retraction laboratory: distances, baselines, a small run, and errors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from manifoldmuon.manifolds.retractions import Normalize, Polar
from studies import RetractionLaboratory, run_study
from studies.retractions.spaces import MATRIX, SPACES, SPHERE, Scalar


def test_distances_match_known_values():
    stiefel, rows = SPACES["Stiefel"], SPACES["rows"]
    stretched = np.diag([1.0, 1.5])
    np.testing.assert_allclose(
        stiefel.distance(np.stack([np.eye(2), stretched])), [0, 0.5], atol=1e-12
    )
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


def test_first_retraction_is_default():
    assert MATRIX["polar"] == Polar()
    assert SPHERE["normalize"] == Normalize()
    for space in SPACES.values():
        name = next(iter(space.retractions))
        manifold = space.build(space.retractions[name], space.shape)
        retraction = getattr(manifold, "retraction", None)
        assert retraction == space.retractions[name]


@pytest.mark.slow
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
    assert "rows, none" in study.table(record)
    assert len(study.plot(record).axes) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"walk_steps": 0}, "steps must be at least 1"),
        ({"rates": (0.1, -1.0)}, "rates must be positive"),
        ({"seeds": ()}, "at least one seed"),
        ({"retractions": ("polar",)}, "none of the retractions fits hypersphere; there are norm"),
        ({"manifolds": ("rows",), "retractions": ("none", "QR")}, "QR fits none of"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        RetractionLaboratory(**settings)
    assert "\n" not in str(error.value)


def test_losses_are_compared_per_seed():
    """Twice the loss at every seed gives a ratio of 2 with an interval of length 0."""

    def rows(retraction, losses):
        return [{"manifold": "rows", "retraction": retraction, "part": "training", "seed": k,
                 "dtype": "float32", "rate": 0.1, "loss_on_the_set": loss}
                for k, loss in enumerate(losses)]  # fmt: skip

    found = RetractionLaboratory().summarise([
        *rows("normalize", [0.1, 0.4, 0.9]),
        *rows("scalar", [0.2, 0.8, 1.8]),
        *rows("none", [0.1, None, 0.9]),
    ])["rows"]  # fmt: skip
    ratio = found["scalar"]["training"]["float32"]["0.1"]["ratio"]
    np.testing.assert_allclose([ratio["value"], *ratio["interval"]], 2)
    assert found["none"]["training"]["float32"]["0.1"] == {
        "diverged": 1, "loss": None, "ratio": None
    }  # fmt: skip
    loss = found["normalize"]["training"]["float32"]["0.1"]["loss"]
    np.testing.assert_allclose(loss["value"], 1.4 / 3)
    half = scipy.stats.t.ppf(0.975, 2) * np.std([0.1, 0.4, 0.9], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(loss["interval"], 1.4 / 3 + half * np.array([-1, 1]), rtol=1e-5)
