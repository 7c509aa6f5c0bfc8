"""Benchmark runner, and small runs of some benchmarks."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as runner
from benchmarks import accelerator, maxtext


def test_help_says_what_each_benchmark_measures(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    assert runner.main() == 0
    printed = capsys.readouterr().out
    for name in runner.NAMES:
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None
        assert re.search(r"\. \([a-z ]*(seconds|minutes?)[a-z ]*\)$", runner.summary(name))
        assert f"{name:{max(map(len, runner.NAMES))}}  {runner.summary(name)}\n" in printed


def test_all_benchmarks_run_even_if_some_fail(monkeypatch):
    seen = []

    def run(line):
        seen.append(line[2:])
        status = {"benchmarks.drift": 1, "benchmarks.tuning": 3}
        return SimpleNamespace(returncode=status.get(line[2], 0))

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
def test_accelerator_benchmark_steps_in_bfloat16(monkeypatch):
    monkeypatch.setattr(accelerator, "NAMES", ("optax.contrib.muon", "muon"))
    row = accelerator.measure_gpt(16, "bfloat16", rounds=1)
    assert row["dtype"] == "bfloat16"
    assert row["seconds"].keys() == {"optax.contrib.muon", "muon", "optax.adamw"}


def test_maxtext_benchmark_subtracts_adamw(monkeypatch, tmp_path, capsys):
    base = {
        "flops": {"1": 1e12, "3": 1e12}, "multiplier_flops": 4e12, "moved": 5e8, "temporary": 2e8,
        "collectives": {"all-gather": [3, 5e8]}, "compile_cpu_seconds": 7.0,
    }  # fmt: skip
    ours = base | {
        "flops": {"1": 1.5e12, "3": 1.5e12}, "multiplier_flops": 6e12, "moved": 5.4e8,
        "collectives": {"all-gather": [3, 5e8], "all-to-all": [2, 4e7]}, "temporary": 3e8,
    }  # fmt: skip
    lines = maxtext.table({"muonh": ours, "optax.adamw": base}).splitlines()
    assert lines[2] == "| optax.adamw | 2 | 4 | 500 MB | in all | 200 MB | 7 s |"
    assert lines[3] == "| muonh | 1 | 2 | 40 MB | 40 all-to-all | 100 MB | 7 s |"
    monkeypatch.setattr(maxtext.importlib.util, "find_spec", lambda name: None)
    maxtext.main(["--out", str(tmp_path / "maxtext.json")])
    assert "skipped, maxtext and libtpu missing" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
