"""Transformers: rounding, the search on known losses, and resuming bit for bit."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from studies import run_study
from studies.transformers.findings import range_of_rates
from studies.transformers.methods import METHODS, PROGRAMS, Knobs, first_matrices, optimizer
from studies.transformers.network import BRANCH_ENDS, Size, loss_of, scores_of
from studies.transformers.picture import KINDS
from studies.transformers.rounding import FOUR_BITS, round_blocks, round_rows
from studies.transformers.search import MOVES, START, best_place, search
from studies.transformers.study import Transformers
from studies.transformers.training import schedule

pytestmark = pytest.mark.slow

TINY = Transformers(
    sizes=("tiny",), lengths=(4,), methods=("Muon",), tries=2, seeds=(0, 1), batch=2, context=8,
    held_out=32, widths=(32,), wide_methods=("Muon",), wide_seeds=(0,),
)  # fmt: skip


def _matrices(seed, shape=(2, 3, 32)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_row_rounding_matches_loop(bits):
    w = _matrices(0)
    w[0, 0] = 0
    found, most = np.asarray(round_rows(jnp.asarray(w), bits)), 2 ** (bits - 1) - 1
    for index in np.ndindex(w.shape[:-1]):
        step = max(abs(w[index])) / most
        levels = step * np.arange(-most, most + 1)
        expected = [levels[np.argmin(abs(levels - x))] for x in w[index]]
        np.testing.assert_allclose(found[index], expected, rtol=1e-5, atol=1e-6)
        assert len(set(found[index])) <= 2 * most + 1


def test_block_rounding_matches_loop():
    w = _matrices(1)
    w[0, 0, :16] = 0
    found = np.asarray(round_blocks(jnp.asarray(w)))
    sizes = np.array([-x for x in FOUR_BITS[:0:-1]] + list(FOUR_BITS))
    for matrix, rounded in zip(w, found, strict=True):
        whole = abs(matrix).max() / (6 * 448)
        for row in range(matrix.shape[0]):
            for start in (0, 16):
                block = matrix[row, start : start + 16]
                scale = np.float32(abs(block).max() / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
                levels = sizes * float(scale) * whole
                expected = [levels[np.argmin(abs(levels - x))] for x in block]
                own = rounded[row, start : start + 16]
                np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


def test_search_follows_distant_minimum_and_avoids_nan():
    def loss(place):
        return (place[0] / 2 - 4) ** 2 + (place[1] - 2) ** 2 + place[2] ** 2 + (place[3] + 1) ** 2

    found = search(loss, 30)
    assert best_place(found) == (8, 2, 0, -1)
    assert len(search(loss, 7)) == 7
    assert next(iter(search(loss, 7, (4, 1, 0, 0)))) == (4, 1, 0, 0)
    assert len(search(lambda place: 0.0, 40)) == 1 + len(MOVES)
    found = search(lambda place: float("nan") if place[0] > -2 else 1.0, 5)
    assert best_place(found)[0] <= -2


def test_range_of_rates_interpolates_linearly():
    tuned = [(-2, 0, 1.1), (0, 0, 1.0), (2, 0, 1.04), (4, 0, 1.5), (0, 1, 0.9)]
    found = range_of_rates(tuned, [0])
    assert not found["open"]
    np.testing.assert_allclose(found["octaves"], 0.2 + 0.5)
    assert range_of_rates(tuned, [1]) == {"octaves": 0.0, "open": True}


def test_schedule_rises_and_falls_to_zero():
    rates = [float(schedule(step, 100)) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.02
    assert np.argmax(rates) == 4


def test_network_is_causal():
    size = Size(32, 1, 7)
    weights = size.start(jax.random.key(0))
    weights["head"] = jax.random.normal(jax.random.key(1), weights["head"].shape)
    tokens = jax.random.randint(jax.random.key(2), (1, 8), 0, 7)
    others = tokens.at[0, 5:].set((tokens[0, 5:] + 1) % 7)
    one, two = (scores_of(weights, x)[0] for x in (tokens, others))
    np.testing.assert_allclose(one[:, :5], two[:, :5], rtol=1e-5, atol=1e-5)
    assert not np.allclose(one[:, 5:], two[:, 5:])


@pytest.mark.parametrize("program", ["Muon, sphere", "Muon, rows", "Muon, streams"])
def test_steps_keep_norms_of_named_program(program):
    size = Size(32, 1, 7)
    start = size.start(jax.random.key(0))["matrices"]
    matrices = first_matrices(program, size, start)
    tx = optimizer(program, Knobs(rate=0.1), lambda step: 1.0)
    grads = jax.tree.map(lambda w: jnp.sin(100 * w), matrices)
    updates, _ = jax.jit(tx.update)(grads, tx.init(matrices), matrices)
    for role, before in matrices.items():
        after = before + updates[role]
        assert float(jnp.max(abs(updates[role]))) > 1e-3
        columns = program == "Muon, streams" and role in BRANCH_ENDS
        axes = (-2, -1) if program == "Muon, sphere" else -2 if columns else -1
        norms = [jnp.linalg.norm(w, axis=axes) for w in (before, after)]
        np.testing.assert_allclose(*norms, rtol=1e-5)


def test_aurora_directions_are_orthonormal_with_equal_rows():
    stack = {"up": jnp.asarray(_matrices(3, (2, 64, 16)) * np.geomspace(0.01, 1, 64)[:, None])}
    stack["down"] = stack["up"].mT
    found = {}
    for program in ("Aurora", "Muon"):
        tx = optimizer(program, Knobs(rate=1.0), lambda step: 1.0)
        updates: Any = tx.update(stack, tx.init(stack), stack)[0]
        np.testing.assert_allclose(updates["up"] / 4, updates["down"].mT, atol=1e-5)
        values = jnp.linalg.svd(updates["up"] / 2, compute_uv=False)
        np.testing.assert_allclose(values, 1, atol=0.03)
        found[program] = jnp.linalg.norm(updates["up"] / 2, axis=-1)
    assert float(jnp.std(found["Aurora"])) < 0.2 * float(jnp.std(found["Muon"]))


def test_every_method_has_a_program():
    assert {method.program for method in METHODS.values()} <= set(PROGRAMS)
    assert all(any(name.startswith(kind) for kind in KINDS) for name in METHODS)
    method = METHODS["Muon"]
    start, knobs = method.knobs(START), method.knobs((2, -1, 1, -2))
    assert knobs.rate == 2 * start.rate == 2.0 ** (method.centre + 1)
    assert knobs.decay == start.decay / 2
    np.testing.assert_allclose([1 - start.momentum, 1 - knobs.momentum], [0.1, 0.2])
    assert knobs.rest_rate == start.rest_rate / 4


def test_search_starts_from_best_of_another_size(tmp_path):
    study = dataclasses.replace(
        TINY, sizes=("tiny", "small"), widths=(), wide_methods=(), tuning_seeds=(100, 101),
        start_from="tiny", later_tries=1, runs=tmp_path / "runs",
    )  # fmt: skip
    tiny, small = run_study(study)["rows"]
    assert len(tiny["tuned"]) == 2
    assert [place for *place, _ in small["tuned"]] == [tiny["place"]]
    names = [json.loads(line)[0] for line in (tmp_path / "runs").read_text().splitlines()]
    assert [json.loads(name)[4] for name in names] == [100, 101, 100, 101, 0, 1, 100, 0, 1]
    untuned = run_study(dataclasses.replace(study, later_tries=0))["rows"]
    assert untuned[1]["tuned"] == [[*tiny["place"], min(loss for *_, loss in tiny["tuned"])]]
    assert untuned[1]["loss"] == small["loss"]


def test_study_resumes_bit_for_bit(tmp_path):
    whole = run_study(dataclasses.replace(TINY, runs=tmp_path / "whole"))
    lines = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "half").write_text("".join(lines[:4]) + lines[4][:9])  # the last line is truncated
    resumed = run_study(dataclasses.replace(TINY, runs=tmp_path / "half"))
    assert resumed == whole
    read = [(tmp_path / name).read_text().splitlines() for name in ("half", "whole")]
    assert read[0].pop(4) == lines[4][:9]
    assert dict(map(json.loads, read[0])) == dict(map(json.loads, read[1]))
    main, wide = whole["rows"]
    assert len(main["tuned"]) == len(main["loss"]) == 2
    assert len(wide["log2_rates"]) == len(wide["loss"][0]) >= 3


def test_zero_head_has_chance_loss():
    weights = Size(32, 1, 7).start(jax.random.key(0))
    tokens = jnp.zeros((2, 4), jnp.int32)
    np.testing.assert_allclose(loss_of(weights, tokens, tokens), np.log(7), rtol=1e-6)
