"""The study of weight erasure: its starts and twins, what keeps a letter, refusals, the claims."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.lab import erasure_auc, run_study
from manifoldmuon.lab.studies import WeightErasure
from manifoldmuon.lab.studies._erasure_findings import findings, half_life
from manifoldmuon.lab.studies._erasure_methods import MIDDLE, Steepest, method_of, twin_of
from manifoldmuon.lab.studies._erasure_training import (
    Problem,
    Protocol,
    curves,
    loss,
    moments,
    problem,
    start,
)

METHODS = ("gradient", "dualized:exact", "stiefel:flat", "stiefel:polar", "hypersphere")


@pytest.fixture(scope="module")
def small() -> Problem:
    """Digits in a network of width 24."""
    return problem("digits", None, False, (24, 24))


@pytest.fixture(scope="module")
def record():
    study = WeightErasure(
        width=24, methods=METHODS, rates=(0.5,), gradient_rates=(0.0,), steps=3, batch=32,
        widths=(24,), rounds=10,
    )  # fmt: skip
    return study, run_study(study)


def test_letters_at_the_start(small):
    """Sharp under the mask, none without, and in between once it is projected."""
    masked = start(small, None, 1, 0)[MIDDLE]
    assert erasure_auc(np.asarray(masked), small.mask) == 1
    whole = start(small, None, 1, 0, masked=False)[MIDDLE]
    assert abs(erasure_auc(np.asarray(whole), small.mask) - 0.5) < 0.05
    stiefel = method_of("stiefel:polar", small.shapes).start
    once, often = (np.asarray(start(small, stiefel, rounds, 0)[MIDDLE]) for rounds in (1, 30))
    left, _, right = np.linalg.svd(np.asarray(masked, np.float64))
    np.testing.assert_allclose(once, left @ right, atol=2e-5)  # the nearest point
    assert erasure_auc(once, small.mask) < 0.8 < 0.95 < erasure_auc(often, small.mask) < 1


def test_what_training_does_to_the_letter(record):
    """A rate of zero keeps it, a dualized step does not; the constraint holds; nothing is NaN."""
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


def test_there_is_no_letter_without_a_mask(small):
    found = curves("gradient", small, Protocol(0.1, 1, 8, 1, 0), masked=False)
    assert all(abs(auc - 0.5) < 0.05 for auc in found["auc"])


@pytest.mark.parametrize("kind", ["stiefel", "hypersphere", "rows"])
def test_a_twin_takes_steps_of_the_same_size(kind, small):
    """What is tangent already is the steepest direction of both, if their norms agree."""
    constrained, flat = (method_of(f"{kind}:{v}", small.shapes) for v in (_FIRST[kind], "flat"))
    assert isinstance(constrained.update, Steepest)
    assert isinstance(flat.update, Steepest)
    assert twin_of(f"{kind}:{_FIRST[kind]}") == f"{kind}:flat"
    assert constrained.constraint == constrained.start
    assert flat.constraint is None
    for layer, shape in enumerate(small.shapes):
        here, there = constrained.update.geometry[layer], flat.update.geometry[layer]
        grad = jnp.asarray(np.random.default_rng(layer).standard_normal(shape), jnp.float32)
        direction = there.steepest(grad, grad, there.init_dual(shape)).direction
        size = float(here.norm(direction)) * flat.update.budgets[layer]
        assert math.isclose(size, constrained.update.budgets[layer], rel_tol=1e-4)


_FIRST = {"stiefel": "polar", "hypersphere": "normalize", "rows": "normalize"}


def test_only_the_middle_is_orthogonal(small):
    """The manifold of the others is flat space, and its own has all singular values 1."""
    update = method_of("orthogonal:QR", small.shapes).update
    assert isinstance(update, Steepest)
    geometry = update.geometry
    assert [manifold.flat for manifold in geometry] == [True, False, True]
    point = start(small, geometry[MIDDLE], 5, 0)[MIDDLE]
    singular = np.linalg.svd(np.asarray(point, np.float64), compute_uv=False)
    np.testing.assert_allclose(singular, 1, atol=1e-5)
    assert twin_of("orthogonal:QR") == "stiefel:flat"


def test_the_loss_against_numpy(small):
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


def test_when_half_of_the_letter_is_gone():
    assert half_life([0, 1, 3], [1.0, 0.9, 0.8]) is None
    assert half_life([0, 1, 3], [1.0, None, None]) is None
    assert half_life([0, 1, 3], [0.7, 0.6, 0.5]) == 0
    assert half_life([0, 1, 3], [1.0, 0.75, 0.5]) == pytest.approx(1)
    # Half-way between log 2 and log 4.
    assert half_life([0, 1, 3], [1.0, 0.8, 0.7]) == pytest.approx(math.sqrt(8) - 1)
    assert moments(301) == [1, 3, 10, 30, 100, 300, 301]
    assert moments(10) == [1, 3, 10]


def run_row(method, rate, accuracy, auc):
    """A row of one measurement after the start."""
    ends = {"train_accuracy": accuracy, "test_accuracy": 0.5, "ratio": 0.5, "update_rank": 1.0}
    return {"part": "run", "method": method, "rate": rate, "seed": 0, "step": [0, 10]} | {
        "auc": [1.0, auc], "distance": [None, None]
    } | {what: [value, value] for what, value in ends.items()}  # fmt: skip


def published_rows(gradient_auc=0.95, middle=57.7):
    """Rows that say what was published."""
    return [
        {"part": "ranks", "width": 128, "gradient": 1.0, "six_steps": middle, "exact": 120.0},
        *(run_row("dualized:six-steps", r, 1.0, a) for r, a in ((0.25, 0.8), (0.5, 0.55))),
        *(run_row("normalized", r, a, gradient_auc) for r, a in ((0.25, 0.6), (0.5, 0.7))),
        run_row("stiefel:flat", 0.5, 1.0, 0.55),
        run_row("stiefel:polar", 0.5, 1.0, 0.52),
        run_row("stiefel:QR", 0.5, 1.0, 0.9),
    ]


def test_the_claims():
    """They hold for what was published, and fail one by one with the numbers they rest on."""
    assert [claim["holds"] for claim in findings(published_rows())["claims"]] == [True] * 3
    erased = findings(published_rows(gradient_auc=0.55))["claims"]
    assert [claim["holds"] for claim in erased] == [True, False, True]
    assert erased[1]["parts"] == {
        "fades_at_a_quarter": True,
        "gone_from_a_half": True,
        "never_gone_without": False,
    }
    assert findings(published_rows(middle=20.0))["claims"][2]["holds"] is False
    assert [claim["holds"] for claim in findings([])["claims"]] == [None] * 3


def test_the_answer():
    answer = findings(published_rows())["answer"]
    assert list(answer) == ["stiefel:polar", "stiefel:QR"]
    # Both fall on a straight line in log(1 + step): 0.25 below the start of 1.
    twin, own = ((math.expm1(math.log(11) * 0.25 / fall)) for fall in (0.45, 0.48))
    assert math.isclose(answer["stiefel:polar"]["speedup"], twin / own)
    assert not answer["stiefel:polar"]["prevents"]
    assert answer["stiefel:QR"]["prevents"]
    assert answer["stiefel:QR"]["speeds_up"] is None


def test_table_and_picture_need_nothing_but_the_record(record):
    study, found = record
    assert "stiefel:polar" in study.table(found)
    figure = study.plot(found)
    assert [bool(axes.lines) for axes in figure.axes] == [True] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ("hypersphere:analytic",)}, "hypersphere takes one of normalize, geodesic"),
        ({"methods": ("adam:polar",)}, "adam has no variants"),
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
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        WeightErasure(**settings)
    assert "\n" not in str(error.value)


def test_the_first_retraction_gets_every_rate():
    study = WeightErasure(
        methods=("stiefel:flat", "stiefel:polar", "stiefel:QR", "rows"), rates=(0.5, 1.0),
        retraction_rates=(0.25,), widths=(),
    )  # fmt: skip
    rates = [(cell["method"], cell["rate"]) for cell in study.cells()]
    assert rates == [
        *(("stiefel:flat", rate) for rate in (0.5, 1.0)),
        *(("stiefel:polar", rate) for rate in (0.5, 1.0)),
        ("stiefel:QR", 0.25),
        *(("rows", rate) for rate in (0.5, 1.0)),
    ]


def test_a_middle_that_is_not_square():
    assert WeightErasure(second_width=32, methods=("stiefel",)).cells()
