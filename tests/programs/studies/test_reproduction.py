"""Small versions of the published examples: protocols, command lines and table."""

import argparse
import inspect
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.modules import Linear
from studies import mixer
from studies.datasets import Dataset
from studies.reproduction import __main__ as reproduce
from studies.reproduction import hello_mnist, hello_world, modula, weight_erasure
from studies.reproduction.rows import CHAPTERS


def orthogonal(matrix, steps):
    """Apply the published iteration to the singular values."""
    u, s, vt = np.linalg.svd(np.asarray(matrix, np.float64), full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@pytest.fixture(scope="module")
def published():
    return hello_world.published(0)


def test_published_problem_has_published_initial_loss(published):
    network, params, x, y = published
    loss = np.mean((np.asarray(network.apply(params, x)) - np.asarray(y)) ** 2)
    assert f"{loss:.6f}" == "0.979311"


def test_initial_weights_match_published_protocol():
    network = modula.mlp(12, 8, 4, modula.TEN_QUINTICS)
    params = modula.init(network, jax.random.key(3), modula.TEN_QUINTICS)
    # The first layer uses the first half of the key; later layers use the key that is left after
    # a split for each layer and each ReLU.
    key = jax.random.key(3)
    keys = [jax.random.split(key)[0]]
    for _ in range(3):
        key = jax.random.split(key)[1]
    keys.append(jax.random.split(jax.random.split(jax.random.key(3))[1])[1])
    keys[1] = jax.random.split(keys[1])[0]
    last = jax.random.key(3)
    for _ in range(4):
        last = jax.random.split(last)[1]
    keys.append(last)
    for key, place, shape in zip(keys, (0, 2, 4), ((8, 12), (8, 8), (4, 8)), strict=True):
        expected = orthogonal(jax.random.normal(key, shape), [(3, -16 / 5, 6 / 5)] * 10)
        expected *= math.sqrt(shape[0] / shape[1])
        np.testing.assert_allclose(params[place], expected, atol=2e-5)
    assert params[1] == params[3] == ()
    assert network.budgets()[0] == network.budgets()[4] == pytest.approx(1 / 3)


def test_only_published_targets_repeat_inputs(published):
    def shared(problem):
        return np.mean(np.ravel(problem.x)[:1280] == np.ravel(problem.y))

    assert shared(published) == 1.0  # the same key for both
    assert shared(hello_world.corrected(0)) < 0.01


def test_nudge_has_size_of_rounding(published):
    nudged = hello_world.nudged(published.params, 1)
    for before, after in zip(published.params[::2], nudged[::2], strict=True):
        change = np.abs(np.asarray(before) - np.asarray(after)).max() / np.abs(before).max()
        assert 1e-8 < change < 1e-6


def test_mixer_is_short_and_has_known_budgets():
    source = inspect.getsource(mixer)
    start, end = source.index("# --- the architecture"), source.index("# --- ... to here")
    lines = [line for line in source[start:end].splitlines()[1:] if line.strip()]
    assert len(lines) < 40
    network = mixer.mixer(10, 8, 2, 12, 3)
    params = jax.eval_shape(network.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
    assert jax.eval_shape(network.apply, params, images).shape == (5, 10)
    assert network.mass == pytest.approx(4.0)
    assert network.sensitivity == pytest.approx(1.0)
    budgets = network.budgets()
    assert budgets[1] == budgets[-1] == pytest.approx(1 / 4)  # embedding and head


def test_mixer_bonds_match_numpy():
    image = np.arange(24.0).reshape(4, 6)
    tokens = np.asarray(mixer.Patches(2).forward(jnp.asarray(image)))
    blocks = [image[i : i + 2, j : j + 2].ravel() for i in (0, 2) for j in (0, 2, 4)]
    np.testing.assert_array_equal(tokens, blocks)
    np.testing.assert_array_equal(mixer.Transpose().forward(jnp.asarray(image)), image.T)
    np.testing.assert_allclose(mixer.Mean().forward(jnp.asarray(image)), image.mean(axis=0))


@pytest.mark.parametrize("example", [hello_world, hello_mnist, weight_erasure, mixer])
def test_invalid_options_give_one_line_error(example, tmp_path, capsys):
    taken = tmp_path / "taken.json"
    taken.write_text('{"settings": 0}', encoding="utf-8")
    mistakes = [["--nonsense"], ["--out", "record.txt"], ["--out", str(taken)]]
    if example is weight_erasure:
        mistakes[2:] = [["--runs", "sgd:1"], ["--runs", "dualized:0"], ["--data-dir", "missing"]]
    for mistake in mistakes:
        with pytest.raises(SystemExit) as refused:
            example.main(mistake)
        said = capsys.readouterr().err
        assert refused.value.code == 2
        assert said.startswith("error: ")
        assert said.count("\n") == 1
    assert taken.read_text(encoding="utf-8") == '{"settings": 0}'


def test_table_lists_all_numbers_without_records(tmp_path, capsys):
    assert reproduce.main(["--table", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for number in ("0.979311", "0.000025", "90.58 %", "1.7122", "1.8968", ".527", "145", "52.7 %"):
        assert number in printed
    table = (tmp_path / reproduce.TABLE).read_text(encoding="utf-8")
    for chapter in CHAPTERS.values():
        assert f"`python -m {chapter.command}`" in table
    assert "not run" in table


def test_reproduce_runs_only_missing_records(tmp_path, monkeypatch, capsys):
    calls = []

    def run(argv):
        calls.append(argv)
        runs = [
            {"protocol": name, "seed": seed, "test_accuracy": 0.5 + seed / 100}
            for name in ("published", "corrected")
            for seed in (0, 1)
        ]
        record = tmp_path / "hello_mnist.json"
        record.write_text(json.dumps({"runs": runs}), encoding="utf-8")
        return 0

    monkeypatch.setattr(hello_mnist, "main", run)
    only = ["--only", "hello_mnist", "--results", str(tmp_path)]
    assert reproduce.main(only) == 0
    assert reproduce.main(only) == 0
    assert calls == [["--out", str(tmp_path / "hello_mnist.json")]]  # once
    assert reproduce.main([*only, "--rerun"]) == 0
    assert calls[1] == [*calls[0], "--overwrite"]
    # The mean of 50 and 51 %; half of Student's interval is 12.706 standard errors of 0.5.
    assert "50.00 % (seeds: 50.50 ± 6.35 %)" in capsys.readouterr().out
    assert reproduce.main(["--only", "hello_gpt", "--results", str(tmp_path)]) == 1
    assert "needs --data-dir" in capsys.readouterr().err


@pytest.mark.slow
def test_weight_erasure_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_erasure, "CHUNK", 2)
    rng = np.random.default_rng(0)
    images, labels = rng.random((40, 2, 2, 3), np.float32), rng.integers(0, 10, 40, np.int32)
    dataset = Dataset(images, labels, images[:9], labels[:9], "noise", tuple("0123456789"))
    run = weight_erasure.which("gradient:0.5")

    def given(name):
        return argparse.Namespace(out=tmp_path / name, width=8, steps=4, overwrite=False)

    *_, whole = weight_erasure.train(run, dataset, given("whole.json"))
    part = weight_erasure.train(run, dataset, given("parts.json"))
    assert [next(part)["step"][-1], next(part)["step"][-1]] == [0, 2]
    part.close()  # as if interrupted
    first, *_, last = weight_erasure.train(run, dataset, given("parts.json"))
    assert first["step"] == [0, 2, 4]  # the same list, extended
    assert last == whole
    assert whole["auc"][0] == 1.0
    assert whole["stable_rank"][0] is None
    assert list(tmp_path.iterdir()) == []  # the checkpoint is removed


def test_linear_layers_have_the_published_shapes():
    parts = [part for part in hello_mnist.NETWORK.parts if isinstance(part, Linear)]
    assert [part.shape for part in parts] == [(256, 784), (256, 256), (10, 256)]
