"""The retraction laboratory: slopes, random walks of known length, baselines, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from manifoldmuon.lab import random_walk, retraction_order, run_study
from manifoldmuon.lab._spaces import MATRIX, SPACES, SPHERE, Scalar
from manifoldmuon.lab.studies import RetractionLaboratory
from manifoldmuon.lab.studies._retractions_findings import findings
from manifoldmuon.manifolds.retractions import Normalize, Polar


@pytest.mark.parametrize(
    ("space", "retraction", "slope"),
    [
        ("Stiefel", "polar", 3),
        ("Stiefel", "QR", 2),
        ("rows", "normalize", 3),
        ("rows", "none", 2),
        ("rows", "geodesic", None),
    ],
)
def test_the_slope_is_one_more_than_the_order(space, retraction, slope):
    manifold, exact = (_space(space, which) for which in (retraction, SPACES[space].exact))
    found = retraction_order(manifold, exact, SPACES[space].shape, jax.random.key(1))
    if slope is None:
        assert found.slope is None
        assert max(found.errors) < 1e-12
    else:
        assert slope - 0.05 < found.slope < slope + 0.05
        assert np.all(np.diff(found.errors) < 0)


def _space(space, retraction):
    here = SPACES[space]
    return here.build(here.retractions[retraction], here.shape)


def _walk(retraction, dtype, rates, steps, seed):
    """Distances from the set and effective steps of rows."""
    rows = SPACES["rows"]
    manifold = _space("rows", retraction)
    found = random_walk(manifold, rows.shape, rates, steps, jax.random.key(seed), dtype)
    return found, np.stack([rows.distance(points) for points in found.points], axis=1)


def test_without_retraction_a_walk_grows_as_pythagoras_says():
    """Every step is orthogonal to its row and has length eta: |w|^2 = 1 + k eta^2 after k."""
    rates = (0.02, 0.5)
    found, distances = _walk("none", "float32", rates, 25, 3)
    assert found.at == [1, 10, 25]
    expected = np.sqrt(1 + np.outer(np.square(rates), found.at)) - 1
    np.testing.assert_allclose(distances, expected, rtol=2e-3)
    np.testing.assert_allclose(found.effective, 1, rtol=1e-4)


def test_a_walk_stays_and_its_steps_are_chords():
    rates = (0.02, 0.5)
    found, distances = _walk("normalize", "float32", rates, 25, 3)
    assert np.max(distances) < 1e-6
    chord = np.sqrt(2 - 2 / np.sqrt(1 + np.square(rates))) / rates
    np.testing.assert_allclose(found.effective, chord, rtol=1e-4)


def test_bfloat16_cannot_take_small_steps():
    """Entries of size 1/4 have a spacing of 2^-10: steps of 1e-4 are all or nothing."""
    found, distances = _walk("normalize", "bfloat16", (1e-4, 0.5), 1, 0)
    chord = np.sqrt(2 - 2 / np.sqrt(1 + 0.5**2)) / 0.5
    assert abs(found.effective[0] - 1) > 0.1
    assert abs(found.effective[1] - chord) < 0.02
    assert 1e-5 < np.max(distances) < 1e-2


@pytest.mark.parametrize(("rates", "steps"), [((0.1,), 0), ((), 5), ((0.1, 0.0), 5)])
def test_a_walk_needs_steps_and_rates(rates, steps):
    with pytest.raises(ValueError, match="steps must be at least 1 and rates positive; got"):
        random_walk(_space("rows", "normalize"), (8, 16), rates, steps, jax.random.key(0))


def test_distances_and_norms():
    stiefel, rows = SPACES["Stiefel"], SPACES["rows"]
    stretched = np.diag([1.0, 1.5])
    np.testing.assert_allclose(
        stiefel.distance(np.stack([np.eye(2), stretched])), [0, 0.5], atol=1e-12
    )
    np.testing.assert_allclose(rows.norm(np.array([[3.0, 4.0], [0.0, 1.0]])), 5)
    assert np.isnan(stiefel.distance(np.full((2, 2), np.inf)))


def test_the_scalar_is_right_where_all_singular_values_are_one():
    rng = np.random.default_rng(0)
    w = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    a = np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]])  # skew and orthogonal
    full, half = 0.3 * w @ a, 0.3 * w @ (a * [1, 1, 0, 0])
    for vector, right in ((full, True), (half, False)):
        moved = Scalar().retract(jnp.float32(w), jnp.float32(vector))
        distance = SPACES["orthogonal"].distance(np.asarray(moved))
        assert distance < 1e-5 if right else distance > 0.01


def test_the_first_retraction_is_the_default():
    assert MATRIX["polar"] == Polar()
    assert SPHERE["normalize"] == Normalize()
    for space in SPACES.values():
        name = next(iter(space.retractions))
        manifold = space.build(space.retractions[name], space.shape)
        retraction = getattr(manifold, "retraction", None)
        assert retraction == space.retractions[name]


def test_the_whole_on_one_manifold(tmp_path):
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
    assert len(study.plot(record).axes) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"walk_steps": 0}, "steps must be at least 1"),
        ({"rates": (0.1, -1.0)}, "rates must be positive"),
        ({"seeds": ()}, "one seed at least"),
        ({"retractions": ("polar",)}, "none of the retractions fits hypersphere; there are norm"),
        ({"manifolds": ("rows",), "retractions": ("none", "QR")}, "QR fits none of"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        RetractionLaboratory(**settings)
    assert "\n" not in str(error.value)


def test_losses_are_compared_seed_by_seed():
    """Twice the loss in every seed is a ratio of 2 without an interval to speak of."""

    def rows(retraction, losses):
        return [{"manifold": "rows", "retraction": retraction, "part": "training", "seed": k,
                 "dtype": "float32", "rate": 0.1, "loss_on_the_set": loss}
                for k, loss in enumerate(losses)]  # fmt: skip

    found = findings([
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
    reach = scipy.stats.t.ppf(0.975, 2) * np.std([0.1, 0.4, 0.9], ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(loss["interval"], 1.4 / 3 + reach * np.array([-1, 1]), rtol=1e-5)
