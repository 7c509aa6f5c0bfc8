"""The solver shoot-out: optimal and suboptimal directions, warm starts, paired differences."""

from pathlib import Path

import numpy as np
import pytest

from manifoldmuon.lab import run_study, solver_gaps
from manifoldmuon.lab._contestants import SOLVERS, NoProjection
from manifoldmuon.lab._trajectory import Given
from manifoldmuon.lab.studies import SolverShootOut
from manifoldmuon.lab.studies._shootout import stacked
from manifoldmuon.manifolds.solvers import ADMM


def problem(m: int, n: int, seed: int) -> Given:
    rng = np.random.default_rng(seed)
    point = np.linalg.qr(rng.standard_normal((m, n)))[0]
    grad = rng.standard_normal((m, n)) * np.geomspace(1, 0.05, n)
    return Given(point.astype(np.float32), grad.astype(np.float32))


FIVE = tuple(range(5))
WINDOWS = [[problem(6, 4, seed)] * 3 for seed in (0, 1)]


def test_the_optimum_has_no_gap_and_others_have():
    exact = solver_gaps(SOLVERS["exact"], *stacked(WINDOWS))
    assert max(exact.cold + exact.warm) < 1e-3
    control = solver_gaps(NoProjection(), *stacked(WINDOWS))
    assert min(control.cold) > 0.02
    assert control.cold == control.warm  # it has no memory


def test_the_residual_of_no_projection():
    """`||W^T A + A^T W||_F / n` of the polar factor, by a singular value decomposition."""
    found = solver_gaps(NoProjection(), *stacked(WINDOWS))
    for residual, window in zip(np.asarray(found.residual_cold), WINDOWS, strict=True):
        u, _, vt = np.linalg.svd(np.float64(window[0].gradient), full_matrices=False)
        inner = np.float64(window[0].point).T @ u @ vt
        np.testing.assert_allclose(residual, np.linalg.norm(inner + inner.T) / 4, rtol=1e-3)


def test_a_warm_start_goes_on():
    """Three times the same problem: the iterations add up."""
    found = solver_gaps(ADMM(steps=3), *stacked(WINDOWS))
    assert all(warm < cold / 2 for warm, cold in zip(found.warm, found.cold, strict=True))


def rows(shift: float) -> list[dict]:
    accuracy = np.random.default_rng(0).random(5)
    return [
        {"part": "training", "solver": solver, "rate": 0.1, "seed": seed,
         "accuracy": value + more, "loss": 2.0**more}
        for solver, more in (("exact", 0.0), ("one step", shift))
        for seed, value in enumerate(accuracy)
    ]  # fmt: skip


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_differences_are_paired(shift):
    """Seeds differ by far more than the solvers do; the difference is exact all the same."""
    study = SolverShootOut(solvers=(), trained=("exact", "one step"), rates=(0.1,), seeds=FIVE)
    found = study.summarise(rows(shift))["training"]["one step"]["0.1"]
    for key, expected in (("accuracy", 100 * shift), ("log_loss", shift * np.log(2))):
        difference = found[f"{key}_minus_exact"]
        np.testing.assert_allclose(difference.value, expected, atol=1e-9)
        np.testing.assert_allclose(difference.interval, expected, atol=1e-9)
    low, high = found["accuracy"].interval
    assert high - low > 10


def test_the_whole_on_one_layer(tmp_path):
    study = SolverShootOut(
        solvers=("no projection",), trained=("exact",), widths=(), rates=(0.1,), steps=8,
        window=2, runs=1, seeds=(0, 1),
    )  # fmt: skip
    record = run_study(study, tmp_path / "record.json")
    followed = record["rows"][0]
    assert followed["shapes"] == [[64, 10]]
    assert np.shape(followed["cold"]) == (1, 4)
    assert all(0 < row["loss"] < 3 for row in record["rows"][1:])
    assert "no projection" in study.table(record)
    assert len(study.plot(record).axes) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_dir": Path()}, "data_dir is for cifar10"),
        ({"steps": 20}, "4 windows of 1 or more; got 20 steps and a window of 8"),
        ({"runs": 9}, "runs must lie between 0 and the 8 seeds"),
        ({"trained": ("one step",)}, "trained must contain 'exact'"),
        ({"rates": ()}, "one rate there must be"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        SolverShootOut(**settings)
