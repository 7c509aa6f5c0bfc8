"""Comparison of solvers: paired differences, a small run, and errors."""

import numpy as np
import pytest

from studies import run_study
from studies.solvers import SolverShootOut

FIVE = tuple(range(5))


def rows(shift: float) -> list[dict]:
    accuracy = np.random.default_rng(0).random(5)
    return [
        {"solver": solver, "rate": 0.1, "seed": seed, "accuracy": value + more, "loss": 2.0**more}
        for solver, more in (("ClosedForm", 0.0), ("ProjectedPolar", shift))
        for seed, value in enumerate(accuracy)
    ]


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_differences_are_paired_by_seed(shift):
    """The difference is exact, even though seeds differ far more than solvers."""
    study = SolverShootOut(solvers=("ClosedForm", "ProjectedPolar"), rates=(0.1,), seeds=FIVE)
    found = study.summarise(rows(shift))["ProjectedPolar"]["0.1"]
    for key, expected in (("accuracy", 100 * shift), ("log_loss", shift * np.log(2))):
        difference = found[f"{key}_minus_exact"]
        np.testing.assert_allclose(difference["value"], expected, atol=1e-9)
        np.testing.assert_allclose(difference["interval"], expected, atol=1e-9)
    low, high = found["accuracy"]["interval"]
    assert high - low > 10


def test_study_runs_on_one_layer(tmp_path):
    study = SolverShootOut(widths=(), rates=(0.1,), steps=12, seeds=(0, 1))
    record = run_study(study, tmp_path / "record.json")
    losses = {(row["solver"], row["seed"]): row["loss"] for row in record["rows"]}
    assert all(0 < loss < 3 for loss in losses.values())
    assert len(set(losses.values())) == 6
    assert "no projection" in study.table(record)
    assert len(study.plot(record).axes) == 2
