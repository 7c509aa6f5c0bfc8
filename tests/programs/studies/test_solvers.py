"""Comparison of solvers: paired differences, a small run, and errors."""

from pathlib import Path

import numpy as np
import pytest

from studies import SolverShootOut, run_study

FIVE = tuple(range(5))


def rows(shift: float) -> list[dict]:
    accuracy = np.random.default_rng(0).random(5)
    return [
        {"part": "training", "solver": solver, "rate": 0.1, "seed": seed,
         "accuracy": value + more, "loss": 2.0**more}
        for solver, more in (("exact", 0.0), ("one step", shift))
        for seed, value in enumerate(accuracy)
    ]  # fmt: skip


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_differences_are_paired_by_seed(shift):
    """The difference is exact, even though seeds differ far more than solvers."""
    study = SolverShootOut(solvers=(), trained=("exact", "one step"), rates=(0.1,), seeds=FIVE)
    found = study.summarise(rows(shift))["training"]["one step"]["0.1"]
    for key, expected in (("accuracy", 100 * shift), ("log_loss", shift * np.log(2))):
        difference = found[f"{key}_minus_exact"]
        np.testing.assert_allclose(difference.value, expected, atol=1e-9)
        np.testing.assert_allclose(difference.interval, expected, atol=1e-9)
    low, high = found["accuracy"].interval
    assert high - low > 10


@pytest.mark.slow
def test_study_runs_on_one_layer(tmp_path):
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
        ({"rates": ()}, "there must be a rate"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        SolverShootOut(**settings)
