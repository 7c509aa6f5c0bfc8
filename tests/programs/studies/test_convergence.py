"""The study of convergence: curves reach the tolerance, and all methods find the minimum."""

import numpy as np
import pytest

from studies import Convergence, run_study


@pytest.mark.slow
def test_methods_reach_same_minimum(tmp_path):
    study = Convergence(tasks=("Procrustes",), retractions=("QR",), seeds=(0,))
    record = run_study(study, tmp_path / "record.json", jobs=1)
    rows = record["rows"]
    assert [row["reason"] for row in rows] == [0] * 4
    np.testing.assert_allclose([row["value"] for row in rows], rows[0]["value"], rtol=1e-10)
    for row in rows:
        assert len(row["gradients"]) == row["steps"] + 1
        assert row["gradients"][-1] <= 1e-10 < row["gradients"][-2]
    newton = record["summary"]["Procrustes"]["trust region"]["QR"]
    assert newton["failed"] == 0
    assert newton["steps"] == rows[0]["steps"] < rows[2]["steps"]
    assert "Procrustes, trust region" in study.table(record)
    assert len(study.plot(record).axes) == 2


def test_empty_choice_raises():
    with pytest.raises(ValueError, match="name at least one"):
        Convergence(seeds=())
