"""Benchmark runner, and small runs of some benchmarks."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as runner
from benchmarks import accelerator, minimize, msign_accuracy, starts
from benchmarks.gpt_throughput import MUON, table


def test_help_says_what_each_benchmark_measures(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    assert runner.main() == 0
    printed = capsys.readouterr().out
    for name in runner.NAMES:
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None
        assert runner.summary(name).endswith(".")
        assert f"{name:{max(map(len, runner.NAMES))}}  {runner.summary(name)}\n" in printed


def test_all_benchmarks_run_even_if_some_fail(monkeypatch):
    seen = []

    def run(line):
        seen.append(line[2:])
        return SimpleNamespace(
            returncode={"benchmarks.drift": 1, "benchmarks.tuning": 3}.get(line[2], 0)
        )

    monkeypatch.setattr(runner.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert runner.main() == 3
    assert seen == [[f"benchmarks.{name}", "--overwrite"] for name in runner.NAMES]
    seen.clear()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "drift", "--steps", "5"])
    assert runner.main() == 1
    assert seen == [["benchmarks.drift", "--steps", "5"]]


def test_unknown_benchmark_gives_one_line_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])
    with pytest.raises(SystemExit, match="no benchmark 'speed'; there are accelerator, "):
        runner.main()


def test_throughput_table_shows_each_optimizer():
    row = {
        "batch": 12,
        "tokens_per_second": {"manifold Muon, ProjectedPolar()": 9000.0, MUON: 10000.0},
        "relative_to_muon": {"manifold Muon, ProjectedPolar()": 0.9, MUON: 1.0},
        "milliseconds_per_step": {"manifold Muon, ProjectedPolar()": 85.3333, MUON: 76.8},
        "milliseconds_of_part": {"momentum": 1.234},
    }
    lines = table([row, row | {"batch": 96}]).splitlines()
    assert lines[2] == "| 12 | manifold Muon, ProjectedPolar() | 85.3 | 9,000 | 90 % |"
    assert lines[5] == f"| 96 | {MUON} | 76.8 | 10,000 | 100 % |"
    assert lines[-1] == "| momentum | 1.23 | 1.23 |"
    assert all(line.count("|") == 4 for line in lines[-3:])


def test_accuracy_benchmark_writes_record_and_table(tmp_path, capsys):
    out = tmp_path / "results" / "accuracy.json"
    options = ["--methods", "SVD", "--out", str(out)]
    msign_accuracy.main(options)
    rows = json.loads(out.read_text())["rows"]
    assert {row["dtype"] for row in rows} == set(msign_accuracy.DTYPES)
    exact = [row for row in rows if row["dtype"] == "float32" and row["condition"] < 1e6]
    assert all(row["orthogonality"] <= 10 and row["forward"] <= 1e-4 for row in exact)
    table = out.with_suffix(".md").read_text()
    assert "| SVD | 64 x 256 |" in table
    assert table in capsys.readouterr().out
    for arguments, words in (
        (options, "pass --overwrite"),
        (["--methods", "magic"], "invalid choice"),
        (["--nonsense"], "unrecognized"),
    ):
        with pytest.raises(SystemExit) as stopped:
            msign_accuracy.main(arguments)
        assert stopped.value.code == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1


def test_accelerator_benchmark_counts_products(tmp_path, capsys):
    out = tmp_path / "accelerator.json"
    accelerator.main(["--out", str(out)])
    assert not out.exists()
    assert "skipped" in capsys.readouterr().out
    [row, *_] = accelerator.sign_rates((2, 16, 32), rounds=1)
    # Each of the four steps forms X^T X, its square, and X p(X^T X), in a single pass, for two
    # matrices.
    counted = row["flops_per_second"]["sign"] * row["seconds"]["sign"]
    assert counted == pytest.approx(2 * 2 * 4 * (2 * 16 * 16 * 32 + 16**3))
    assert row["flops_per_second"]["product"] > 0


@pytest.mark.slow
def test_minimize_benchmark_times_with_and_without_compiling(tmp_path, capsys):
    out = tmp_path / "minimize.json"
    options = ["--sizes", "5", "--problems", "Rayleigh quotient", "--rounds", "1"]
    minimize.main([*options, "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    for name in minimize.METHODS:
        found = row["methods"][name]
        assert found["reason"] == "GRADIENT"
        assert found["gradient_norm"] <= 1e-10
        assert 0 < found["again"] < found["cached"] < found["first"]
        assert found["value"] == pytest.approx(-1)  # the largest eigenvalue is 1
    assert "| Rayleigh quotient | 5 | " in capsys.readouterr().out


@pytest.mark.slow
def test_starts_benchmark_times_vmap_and_map(tmp_path, capsys):
    out = tmp_path / "starts.json"
    options = ["--problems", "PCA, ordered", "--size", "5", "--starts", "2", "--rounds", "1"]
    starts.main([*options, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == list(minimize.METHODS)
    for row in rows:
        assert row["failed"] == {"vmap": 0, "map": 0}
        assert min(row["seconds"][name] for name in ("one", "vmap", "map")) > 0
        assert row["most_steps"] >= row["median_steps"] > 1
    assert "| PCA, ordered | L-BFGS | 5 | " in capsys.readouterr().out
