"""The study of weight erasure: initial weights, twins, erased letters, table and errors."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.lab import erasure_auc
from studies import WeightErasure, run_study
from studies.erasure.methods import (
    FLAT,
    MIDDLE,
    RETRACTIONS,
    Steepest,
    method_of,
    split,
    twin_of,
)
from studies.erasure.training import (
    Problem,
    Protocol,
    curves,
    half_life,
    loss,
    moments,
    problem,
    start,
)
from studies.retractions.spaces import MATRIX, SPHERE

METHODS = ("gradient", "dualized:exact", "stiefel:flat", "stiefel:polar", "hypersphere")


@pytest.fixture(scope="module")
def small() -> Problem:
    """Return the digits problem with a network of width 24."""
    return problem("digits", None, False, (24, 24))


@pytest.fixture(scope="module")
def record():
    study = WeightErasure(
        width=24, methods=METHODS, rates=(0.5,), gradient_rates=(0.0,), steps=3, batch=32,
        widths=(24,), rounds=10, seeds=(0, 1),
    )  # fmt: skip
    return study, run_study(study)


def test_initial_weights_contain_letter(small):
    """The letter is sharp with a mask, absent without, and weaker after a projection."""
    masked = start(small, None, 1, 0)[MIDDLE]
    assert erasure_auc(np.asarray(masked), small.mask) == 1
    whole = start(small, None, 1, 0, masked=False)[MIDDLE]
    assert abs(erasure_auc(np.asarray(whole), small.mask) - 0.5) < 0.05
    stiefel = method_of("stiefel:polar", small.shapes).start
    once, often = (np.asarray(start(small, stiefel, rounds, 0)[MIDDLE]) for rounds in (1, 30))
    left, _, right = np.linalg.svd(np.asarray(masked, np.float64))
    np.testing.assert_allclose(once, left @ right, atol=2e-5)  # the nearest point
    assert erasure_auc(once, small.mask) < 0.8 < 0.95 < erasure_auc(often, small.mask) < 1


@pytest.mark.slow
def test_training_erases_letter(record):
    """Rate 0 keeps the letter, dualized steps erase it; constraints hold; values are finite."""
    rows = {row["method"]: row for row in record[1]["rows"] if row["part"] == "run"}
    assert rows["gradient"]["auc"] == [1, 1, 1]
    assert rows["gradient"]["ratio"] == [0, 0, 0]
    assert np.all(np.diff(rows["dualized:exact"]["auc"]) < 0)
    assert rows["stiefel:polar"]["distance"][-1] < 1e-5
    assert rows["hypersphere"]["distance"][-1] < 1e-5
    assert rows["stiefel:flat"]["distance"] == [None] * 3
    assert rows["stiefel:flat"]["auc"][0] == rows["stiefel:polar"]["auc"][0] < 1
    assert rows["hypersphere"]["auc"][0] == 1
    assert rows["stiefel:polar"]["step"] == [0, 1, 3]


def test_no_letter_without_mask(small):
    found = curves("gradient", small, Protocol(0.1, 1, 8, 1, 0), masked=False)
    assert all(abs(auc - 0.5) < 0.05 for auc in found["auc"])


@pytest.mark.parametrize("kind", ["stiefel", "hypersphere", "rows"])
def test_twin_takes_steps_of_same_norm(kind, small):
    """A direction that is already tangent is steepest for both, if their norms agree."""
    constrained, flat = (method_of(f"{kind}:{v}", small.shapes) for v in (_FIRST[kind], "flat"))
    assert isinstance(constrained.update, Steepest)
    assert isinstance(flat.update, Steepest)
    assert twin_of(f"{kind}:{_FIRST[kind]}") == f"{kind}:flat"
    assert constrained.constraint == constrained.start
    assert flat.constraint is None
    for layer, shape in enumerate(small.shapes):
        here, there = constrained.update.geometry[layer], flat.update.geometry[layer]
        grad = jnp.asarray(np.random.default_rng(layer).standard_normal(shape), jnp.float32)

        @jax.jit
        def norm_of_step(grad, here=here, there=there):
            return here.norm.norm(there.steepest(grad, grad, there.init_dual(grad.shape)).direction)

        size = float(norm_of_step(grad)) * flat.update.budgets[layer]
        assert math.isclose(size, constrained.update.budgets[layer], rel_tol=1e-4)


_FIRST = {"stiefel": "polar", "hypersphere": "normalize", "rows": "normalize"}


def test_only_middle_layer_is_orthogonal(small):
    """The other layers are in flat space; all singular values of the middle layer are 1."""
    update = method_of("orthogonal:QR", small.shapes).update
    assert isinstance(update, Steepest)
    geometry = update.geometry
    assert [manifold.constrained for manifold in geometry] == [False, True, False]
    point = start(small, geometry[MIDDLE], 5, 0)[MIDDLE]
    singular = np.linalg.svd(np.asarray(point, np.float64), compute_uv=False)
    np.testing.assert_allclose(singular, 1, atol=1e-5)
    assert twin_of("orthogonal:QR") == "stiefel:flat"


def test_loss_matches_numpy(small):
    weights = start(small, None, 1, 0)
    x, y = (np.asarray(part[:16]) for part in small.train)
    hidden = x.astype(np.float64)
    for weight in weights[:-1]:
        hidden = np.maximum(hidden @ np.asarray(weight, np.float64).T, 0)
    errors = hidden @ np.asarray(weights[-1], np.float64).T - np.eye(10)[y]
    assert math.isclose(
        float(loss(weights, small.train[0][:16], small.train[1][:16])),
        (errors**2).mean(),
        rel_tol=1e-5,
    )


def test_half_life_interpolates_in_log_steps():
    assert half_life([0, 1, 3], [1.0, 0.9, 0.8]) is None
    assert half_life([0, 1, 3], [1.0, None, None]) is None
    assert half_life([0, 1, 3], [0.7, 0.6, 0.5]) == 0
    assert half_life([0, 1, 3], [1.0, 0.75, 0.5]) == pytest.approx(1)
    # Halfway between log 2 and log 4.
    assert half_life([0, 1, 3], [1.0, 0.8, 0.7]) == pytest.approx(math.sqrt(8) - 1)
    assert moments(301) == [1, 3, 10, 30, 100, 300, 301]
    assert moments(10) == [1, 3, 10]


@pytest.mark.slow
def test_table_and_plot_need_only_the_record(record):
    study, found = record
    assert "stiefel:polar" in study.table(found)
    figure = study.plot(found)
    assert [bool(axes.lines) for axes in figure.axes] == [True] * 6
    again = json.loads(json.dumps(study.summarise(found["rows"])))
    assert again == found["summary"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ("hypersphere:analytic",)}, "hypersphere takes one of normalize, geodesic"),
        ({"methods": ("adam:polar",)}, "adam has no variants"),
        ({"methods": ("rows:QR",)}, "rows takes one of normalize, geodesic, scalar, none, flat"),
        ({"seeds": (0, 0)}, "seeds must differ"),
        ({"methods": ("sgd",)}, "methods are gradient, .* got 'sgd'"),
        ({"methods": ("adam", "adam")}, "methods must differ"),
        ({"methods": ("orthogonal",), "second_width": 32}, "orthogonal does not fit the middle"),
        ({"rates": (0.5, -1.0)}, "rates must not be negative"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"width": 4}, "width of at least 8"),
        ({"seeds": ()}, "seeds must hold at least one"),
        ({"data_dir": Path("somewhere")}, "digits ship with"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        WeightErasure(**settings)
    assert "\n" not in str(error.value)


def test_first_retraction_gets_every_rate():
    study = WeightErasure(
        methods=("stiefel:flat", "stiefel:polar", "stiefel:QR", "rows"), rates=(0.5, 1.0),
        retraction_rates=(0.25,), widths=(), seeds=(0,),
    )  # fmt: skip
    rates = [(cell["method"], cell["rate"]) for cell in study.cells()]
    assert rates == [
        *(("stiefel:flat", rate) for rate in (0.5, 1.0)),
        *(("stiefel:polar", rate) for rate in (0.5, 1.0)),
        ("stiefel:QR", 0.25),
        *(("rows", rate) for rate in (0.5, 1.0)),
    ]


def test_every_manifold_has_every_retraction(small):
    """With a twin and the named retraction; the first gets all rates, the others fewer."""
    study = WeightErasure()
    cells = [cell for cell in study.cells() if cell["part"] == "run"]
    spaces = {"stiefel": MATRIX, "orthogonal": MATRIX, "hypersphere": SPHERE, "rows": SPHERE}
    assert spaces.keys() == RETRACTIONS.keys()
    for space, retractions in spaces.items():
        for place, (name, retraction) in enumerate(retractions.items()):
            method = f"{space}:{name}"
            update = method_of(method, small.shapes).update
            assert isinstance(update, Steepest)
            assert vars(update.geometry[MIDDLE])["retraction"] == retraction
            assert twin_of(method) in study.methods
            rates = {cell["rate"] for cell in cells if cell["method"] == method}
            assert rates == set(study.retraction_rates if place else study.rates)
    constrained = [name for name in study.methods if split(name)[0] in spaces]
    assert len([name for name in constrained if split(name)[1] != FLAT]) == 7 + 7 + 4 + 4


def test_rectangular_middle_layer_is_accepted():
    assert WeightErasure(second_width=32, methods=("stiefel",)).cells()
