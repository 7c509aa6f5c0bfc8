"""The main job, end to end, in a short run: its table, files and results."""

import runpy
import sys

import numpy as np
import pytest

from benchmarks._gradients import record_gradients
from studies import run_study
from studies.digits.methods import METHODS
from studies.digits.study import Digits
from studies.digits.training import chunk_lengths
from studies.records import read_record

# The rates are tuned for 500 steps; with its tuned rate, Muon would not learn in this few.
RATES = tuple(0.03 if name == "muon" else m.learning_rate for name, m in METHODS.items())
TINY = Digits(widths=(24,), steps=40, batch_size=64, seeds=(0, 3), learning_rates=RATES)


@pytest.fixture(scope="module")
def record():
    return run_study(TINY)


def runs(record, name):
    return [row for row in record["rows"] if row["optimizer"] == name]


@pytest.mark.slow
def test_every_optimizer_learns_from_same_start(record):
    for row in record["rows"]:
        assert row["train_loss"][-1] < row["train_loss"][0] / 3
        assert row["test_accuracy"][-1] > 0.5  # chance is 0.1
    for seed in (0, 3):
        starts = {tuple(row[k][0] for k in ("train_loss", "test_accuracy", "largest", "smallest"))
                  for row in record["rows"] if row["seed"] == seed}  # fmt: skip
        assert len(starts) == 1


@pytest.mark.slow
def test_weights_stay_on_manifolds(record):
    for run in runs(record, "stiefel"):
        assert len(run["distance"]) == len(run["step"]) - 1
        assert max(run["distance"]) <= 1e-5
        # Checked independently of the library's monitor, by float64 singular values.
        assert max(run["largest"]) <= 1 + 1e-5
        assert min(run["smallest"]) >= 1 - 1e-5
        assert 0 <= max(run["gap"]) <= 3e-2
        assert 0 <= max(run["residual"]) <= 1e-3
    for run in runs(record, "sphere"):
        assert max(run["distance"]) <= 1e-5
        np.testing.assert_allclose(run["frobenius_norms"], [24**0.5, 10**0.5], rtol=1e-5)
    for name in ("adamw", "muon"):  # free weights have left
        assert all(max(run["largest"]) > 1 + 1e-3 for run in runs(record, name))
        assert all(run["distance"] == [] for run in runs(record, name))


@pytest.mark.slow
def test_program_writes_record_and_picture(tmp_path, monkeypatch, capsys):
    """`make train` with options, twice: the second run gets the next free name."""
    monkeypatch.chdir(tmp_path)
    options = "--widths 16 --steps 7 --seeds 5 --optimizers stiefel --learning-rates 0.03"
    options += " --solver ProjectedPolar --multiplier 8"
    monkeypatch.setattr(sys, "argv", ["digits", *options.split()])
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module("studies.digits", run_name="__main__")
    files = [
        tmp_path / "runs" / f"digits{n}.{kind}" for kind in ("json", "png") for n in ("", "-2")
    ]
    assert {*(tmp_path / "runs").iterdir()} == {*files}
    first, second = (read_record(path, "digits") for path in files[:2])
    assert first["rows"][0]["train_loss"] == second["rows"][0]["train_loss"]
    assert first["rows"][0]["step"][-1] == 7  # the last step, not a multiple of the chunk
    assert first["summary"]["stiefel"]["lipschitz"]["mean"] == pytest.approx(8, rel=1e-5)
    assert "manifold Muon" in capsys.readouterr().out


def test_diverging_run_is_reported():
    study = Digits(widths=(8,), steps=4, optimizers=("adamw",), learning_rates=(1e38,), seeds=(0,))
    record = run_study(study)
    assert record["summary"]["adamw"]["train_loss"]["mean"] is None
    assert "nan" in study.table(record)
    assert study.plot(record) is not None


@pytest.mark.parametrize(("steps", "numbers"), [(1, 9), (19, 9), (500, 9), (601, 9), (40, 2**25)])
def test_chunks_cover_the_steps(steps, numbers):
    lengths = chunk_lengths(steps, numbers)
    assert sum(lengths) == steps
    assert len(set(lengths)) <= 2  # each length is compiled once
    assert max(lengths) * numbers <= 2**26
    assert numbers > 9 or len(lengths) <= 20


def test_recorded_gradients_are_tall():
    # Without hidden layers, the only matrix is wide.
    job = Digits(widths=(), batch_size=64, solver="ProjectedPolar")
    recorded = record_gradients(6, 2, job=job)
    assert [name for name, _, _ in recorded] == [f"layer 1, step {step}" for step in (0, 3, 5)]
    for _, point, gradient in recorded:
        assert point.shape == gradient.shape == (64, 10)
        np.testing.assert_allclose(point.T @ point, np.eye(10), atol=1e-5)
        assert np.abs(gradient).max() > 0
    assert np.abs(recorded[0][1] - recorded[1][1]).max() > 1e-3
    with pytest.raises(ValueError, match="at must be steps from 0 to 5"):
        record_gradients(6, 2, at=[6], job=job)
