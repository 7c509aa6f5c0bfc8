"""Small versions of the published examples: protocols, records and table."""

import math

import jax
import numpy as np
import pytest

from manifoldmuon.modules import Linear
from studies import run_study
from studies.agd import AutomaticDescent
from studies.datasets import Dataset, FlatImages
from studies.reproduction import hello_mnist, hello_world, modula, weight_erasure
from studies.reproduction.hello_mnist import HelloMNIST
from studies.reproduction.hello_world import HelloWorld
from studies.reproduction.manifold_cifar import ManifoldCIFAR
from studies.reproduction.weight_erasure import WeightErasure

pytestmark = pytest.mark.slow


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


def test_hello_world_learns():
    study = HelloWorld(steps=101)
    first, last = study.run({"protocol": "published", "seed": 0, "nudge": 0})["loss"]
    assert f"{first:.6f}" == "0.979311"
    assert last < 0.01
    rows = [{**cell, "loss": [0.5, 0.25]} for cell in study.cells()]
    assert "0.250000" in study.table({"summary": study.summarise(rows)})


def noise(count, side):
    rng = np.random.default_rng(0)
    images, labels = rng.random((count, side, side), np.float32), rng.integers(0, 10, count)
    labels = labels.astype(np.int32)
    return Dataset(images, labels, images[:9], labels[:9], "noise", tuple("0123456789"))


def test_hello_mnist_has_published_network_and_samples(monkeypatch):
    parts = [part for part in hello_mnist.NETWORK.parts if isinstance(part, Linear)]
    assert [part.shape for part in parts] == [(256, 784), (256, 256), (10, 256)]
    monkeypatch.setattr(hello_mnist, "load_mnist", lambda folder: noise(800, 28))
    record = run_study(HelloMNIST(steps=2))
    assert {row["sampled"] for row in record["rows"]} == {784, 800}
    first, second = (record["summary"][name]["mean"] for name in ("published", "corrected"))
    assert 0 <= min(first, second) <= max(first, second) <= 100


def test_manifold_cifar_stays_on_manifold(monkeypatch):
    data = np.random.default_rng(0).standard_normal((1100, 12)).astype(np.float32)
    labels = np.arange(1100, dtype=np.int32) % 10
    flat = FlatImages(data, labels, data[:50], labels[:50], 10)
    monkeypatch.setattr("studies.classification.cifar10", lambda folder: flat)
    for row in run_study(ManifoldCIFAR(lengths=(2,), seeds=(0, 1)))["rows"]:
        free = row["method"] == "adamw"
        assert (abs(row["largest"] - 1) < 1e-5) == (abs(row["smallest"] - 1) < 1e-5) == (not free)


def test_weight_erasure_measures_letter(monkeypatch):
    images = noise(40, 2)
    monkeypatch.setattr(weight_erasure, "load_cifar10", lambda folder: images)
    monkeypatch.setattr(weight_erasure, "CHUNK", 2)
    study = WeightErasure(runs=("gradient:0.5", "dualized:0.5:all"), widths=(8,), width=8, steps=4)
    ranks, run, _ = run_study(study)["rows"]
    rounding = 64 * np.finfo(np.float32).eps  # of the sum of 64 squares
    assert 1 <= ranks["gradient"][0] <= ranks["converged"][0] <= 8 * (1 + rounding)
    assert run["step"] == [0, 2, 4]
    assert (run["auc"][0], run["ratio"][0], run["stable_rank"][0]) == (1.0, 0.0, None)
    assert run["stable_rank"][1] >= 1 - 1e-6


def test_agd_and_adam_learn():
    study = AutomaticDescent(width=16, depths=(2,), epochs=6, learning_rates=(0.001, 0.01))
    record = run_study(study)
    assert [row["method"] for row in record["rows"]] == ["agd", "adam 0.001", "adam 0.01"]
    assert len({row["train_loss"][0] for row in record["rows"]}) == 1
    for row in record["rows"]:
        assert row["train_loss"][-1] < 0.8 * row["train_loss"][0]
        assert len(row["train_loss"]) == 7
    first, *others = record["rows"]
    assert len(first["eta"]) == 6
    assert all(0 < eta < np.log(2) for eta in first["eta"])  # G < 2, by lemma 7 of the paper
    assert first["test_accuracy"][-1] > 0.5
    best = max(others, key=lambda row: row["test_accuracy"][-1])["method"]
    assert record["summary"]["2"]["best_adam"] == best
