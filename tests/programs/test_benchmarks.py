"""Benchmark runner, and small runs of some benchmarks."""

import importlib.util
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks import __main__ as runner
from benchmarks import accelerator, growth, minimize, starts, symmetric
from benchmarks.gpt_throughput import MUON, table


def test_every_benchmark_module_exists():
    for name in runner.NAMES:
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None


def test_all_benchmarks_run_even_if_some_exit(monkeypatch, capsys):
    seen = []
    ends = {"solvers": 0, "drift": "no room", "tuning": 3}

    def run_module(module, run_name):
        name = module.removeprefix("benchmarks.")
        seen.append((name, run_name, sys.argv[1:]))
        if name in ends:
            sys.exit(ends[name])

    monkeypatch.setattr(runner.runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert runner.main() == 3
    assert seen == [(name, "__main__", ["--overwrite"]) for name in runner.NAMES]
    assert capsys.readouterr().err == "no room\n"
    seen.clear()
    monkeypatch.setattr(sys, "argv", ["benchmarks", "drift", "--steps", "5"])
    assert runner.main() == 1
    assert seen == [("drift", "__main__", ["--steps", "5"])]


def test_unknown_benchmark_gives_one_line_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "speed"])
    with pytest.raises(SystemExit, match="no benchmark 'speed'; there are steps, "):
        runner.main()


def test_throughput_table_shows_each_optimizer():
    row = {
        "batch": 12,
        "tokens_per_second": {"manifold Muon, fast": 9000.0, MUON: 10000.0},
        "relative_to_muon": {"manifold Muon, fast": 0.9, MUON: 1.0},
        "milliseconds_per_step": {"manifold Muon, fast": 85.3333, MUON: 76.8},
        "milliseconds_of_part": {"momentum": 1.234},
    }
    lines = table([row, row | {"batch": 96}]).splitlines()
    assert lines[2] == "| 12 | manifold Muon, fast | 85.3 | 9,000 | 90 % |"
    assert lines[5] == f"| 96 | {MUON} | 76.8 | 10,000 | 100 % |"
    assert lines[-1] == "| momentum | 1.23 | 1.23 |"
    assert all(line.count("|") == 4 for line in lines[-3:])


@pytest.mark.slow
def test_growth_benchmark_measures_each_axis(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "AXES", {"width": (8, 16, 32), "leaves": (1, 2, 3), "copies": (2,)})
    monkeypatch.setattr(growth, "OURS", ("muon",))
    monkeypatch.setattr(growth, "PEERS", 1)
    out = tmp_path / "growth.json"
    limits = ["--rounds", "1", "--widest", "16", "--most", "2"]
    growth.main([*limits, "--axes", "width", "leaves", "copies", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["grows"], row["size"]) for row in rows] == [
        *(("width", 8), ("width", 16), ("width", 32), ("leaves", 1), ("leaves", 2), ("copies", 2))
    ]
    for row in rows:
        assert all(value > 0 for value in row["compile_seconds"].values())
        assert set(growth.OURS) <= set(row["memory"])
        assert (MUON in row["memory"]) == (row["grows"] != "leaves" or row["size"] == 1)
        assert ("seconds" in row) == (row["size"] <= 16)
    # An exponent needs a line through three points: two sizes, or two timed widths, have none.
    width = [row for row in rows if row["grows"] == "width"]
    slope = np.polyfit(np.log([8, 16, 32]), np.log([row["memory"]["muon"] for row in width]), 1)[0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| width", "trace and compile"],
        ["| width", "temporary memory of a device"],
    ]
    assert lines[3].endswith(f" | {slope:.2f} |")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_received_bytes_count_collectives():
    text = "%x = (f32[2,8]{1,0}, f32[2,8]) all-to-all(%a, %b)\n%y = s32[4] all-gather-start(%c)\n"
    assert growth.received(text + "%z = f32[9] add(%y, %y)", 4) == 0.75 * 4 * (16 + 16 + 4)


def test_accelerator_benchmark_counts_products(tmp_path, capsys):
    out = tmp_path / "accelerator.json"
    accelerator.main(["--out", str(out)])
    assert not out.exists()
    assert "skipped" in capsys.readouterr().out
    [row, *_] = accelerator.sign_rates((2, 16, 32), rounds=1)
    # Each of the four steps forms X^T X, its square, and X p(X^T X), in a single pass, for two
    # matrices.
    counted = row["flops_per_second"] * row["seconds"]
    assert counted == pytest.approx(2 * 2 * 4 * (2 * 16 * 16 * 32 + 16**3))
    assert row["product_flops_per_second"] > 0


@pytest.mark.parametrize("shape", [(16, 24), (32, 8)])
def test_symmetric_product_kernel_matches_numpy(shape):
    """Interpreted TPU kernel: it computes blocks below the diagonal once and mirrors them."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = symmetric.gram(jnp.asarray(x), 8, 8, interpret=pltpu.InterpretParams())
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found, wide @ wide.T, atol=1e-4)
    np.testing.assert_array_equal(found, np.asarray(found).T)


@pytest.mark.slow
def test_minimize_benchmark_times_with_and_without_compiling(tmp_path, capsys):
    out = tmp_path / "minimize.json"
    options = ["--sizes", "5", "--problems", "Rayleigh quotient", "--rounds", "1", "--starts", "2"]
    minimize.main([*options, "--out", str(out)])
    [row] = json.loads(out.read_text())["rows"]
    for name in minimize.METHODS:
        found = row["methods"][name]
        assert found["reason"] == "GRADIENT"
        assert found["gradient_norm"] <= 1e-10
        assert 0 < found["again"] < found["cached"] < found["first"]
        assert found["starts"] > 0
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
        assert row["vmap"] > 0 < row["map"]
        assert row["most_steps"] >= row["median_steps"] > 1
    assert "| PCA, ordered | L-BFGS | 5 | " in capsys.readouterr().out
