"""The character GPT: few steps of a tiny network on a small text."""

import dataclasses
import json
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import MODULA_SIX_STEP
from manifoldmuon.modules import Bond
from studies.datasets import batches, split_text, windows
from studies.gpt.__main__ import main
from studies.gpt.methods import METHODS
from studies.gpt.sampling import sample
from studies.gpt.settings import Settings
from studies.gpt.texts import load
from studies.gpt.training import Trainer, mean_loss

TINY = Settings(steps=20, batch=4, context=8, width=8, heads=2, blocks=2, seeds=(3,))
LETTERS = "It was the best of times, it was the worst of times. " * 40
ARGUMENTS = ["--steps", "20", "--batch", "4", "--context", "8", "--width", "8", "--heads", "2",
             "--blocks", "2", "--sample", "30"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a text."""
    (tmp_path / "tinyshakespeare.txt").write_text(LETTERS, encoding="utf-8")
    return tmp_path


def test_text_is_split_and_encoded():
    text = split_text("letters", LETTERS)
    assert text.characters == "".join(sorted(set(LETTERS)))
    assert text.decode(text.train) + text.decode(text.validation) == LETTERS
    assert len(text.train) == int(0.9 * len(LETTERS))


def test_default_text_is_python_help():
    text = load(None)
    assert "lambda" in text.decode(text.train)


def test_windows_are_sampled_without_replacement():
    starts = batches(0, 23 - 3, steps=8, batch_size=5)
    first, second = starts.reshape(2, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first.tolist() != second.tolist()
    tokens = np.arange(100, 123)
    inputs, targets = windows(jnp.asarray(tokens), jnp.asarray(starts), 3)
    for place, row, following in zip(
        starts.ravel(), np.reshape(inputs, (-1, 3)), np.reshape(targets, (-1, 3)), strict=True
    ):
        np.testing.assert_array_equal(row, tokens[place : place + 3])
        np.testing.assert_array_equal(following, tokens[place + 1 : place + 4])


@pytest.mark.slow
def test_published_protocol_matches_numpy():
    """For two steps: average of gradients, six polynomials, target norms, falling rate."""
    text = split_text("letters", LETTERS)
    network, tx, _ = METHODS["published"].job(TINY, len(text.characters))
    gradient = jax.jit(jax.grad(mean_loss(network, TINY.context)))
    update = jax.jit(tx.update)
    weights = network.init(jax.random.key(0))
    state = tx.init(weights)
    expected = [np.asarray(w, np.float64) for w in jax.tree.leaves(weights)]
    average = [np.zeros_like(w) for w in expected]
    targets = [1 / 7, *[5 / 7] * 3, *[5 / 21] * 3, 1 / 7]  # the blocks have 5 of the total mass 7
    for step in range(2):
        starts = jnp.arange(4) + 4 * step
        grads = gradient(weights, jnp.asarray(text.train), starts)
        for k, grad in enumerate(jax.tree.leaves(grads)):
            average[k] = 0.95 * average[k] + 0.05 * np.asarray(grad, np.float64)
            direction = dualized_table(average[k]) if k == 0 else dualized_matrices(average[k])
            expected[k] -= 0.1 * (1 - step / TINY.steps) * targets[k] * direction
        updates, state = update(grads, state, weights)
        weights = jax.tree.map(jnp.add, weights, updates)
    for found, wanted in zip(jax.tree.leaves(weights), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def dualized_table(grad: np.ndarray) -> np.ndarray:
    """Scale every row to root mean square 1; zero rows stay zero."""
    lengths = np.linalg.norm(grad, axis=1, keepdims=True)
    return np.sqrt(grad.shape[1]) * grad / np.where(lengths == 0, 1, lengths)


def dualized_matrices(grads: np.ndarray) -> np.ndarray:
    """Divide by the Frobenius norm and apply the six polynomials to the singular values."""
    u, s, vt = np.linalg.svd(grads, full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for a, b, c in MODULA_SIX_STEP.coefficients:
        s = a * s + b * s**3 + c * s**5
    m, n = grads.shape[-2:]
    return np.sqrt(m / n) * (u * s[..., None, :]) @ vt


@pytest.mark.slow
def test_constrained_gpt_learns_on_manifold():
    text = split_text("letters", LETTERS)
    trainer = Trainer(dataclasses.replace(TINY, optimizer="constrained"), text)
    seen: list[int] = []
    run, weights = trainer.train(3, lambda run, steps: seen.append(steps))
    assert sum(seen) == len(run.train_loss) == TINY.steps
    assert run.step == [TINY.steps]
    assert np.mean(run.train_loss[-5:]) < np.mean(run.train_loss[:5]) - 0.2
    table, *matrices = (np.asarray(w, np.float64) for w in jax.tree.leaves(weights))
    worst = np.abs(np.sqrt(np.mean(table**2, axis=1)) - 1).max()
    for w in matrices:
        values = np.linalg.svd(w, compute_uv=False) / np.sqrt(w.shape[-2] / w.shape[-1])
        worst = max(worst, np.abs(values - 1).max())
    assert worst <= 2e-6
    assert run.distance is not None
    assert worst - 1e-6 <= run.distance <= 1e-5  # the distance of the worst step

    # The whole validation part, by a loop over adjacent windows.
    losses = []
    for start in range(0, len(text.validation) - 8, 8):
        scores = np.asarray(
            trainer.job.network.apply(weights, jnp.asarray(text.validation[start : start + 8])),
            np.float64,
        )
        scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        losses.append(-scores[np.arange(8), text.validation[start + 1 : start + 9]].mean())
    assert run.validation_whole == pytest.approx(np.mean(losses), rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Successor(Bond):
    """Scores for the sum of the last two tokens modulo 7: a sequence with memory."""

    sensitivity: ClassVar[float] = 1.0
    gamma: ClassVar[float] = 0.0

    def forward(self, x):
        before = jnp.concatenate([jnp.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)
        return 9.0 * jax.nn.one_hot((x + before) % 7, 7)


@pytest.mark.parametrize("prompt", [[1, 1], [3, 5, 1, 1, 2]])
def test_sampling_continues_prompt(prompt):
    found = sample(Successor(), (), jax.random.key(0), jnp.asarray(prompt), 3, 12, 0.05)
    expected = list(prompt)
    for _ in range(12):
        expected.append((expected[-1] + expected[-2]) % 7)
    assert np.asarray(found).tolist() == expected[len(prompt) :]


def test_temperature_sets_sampling_probabilities():
    draws = {
        t: np.asarray(sample(Successor(), (), jax.random.key(1), jnp.asarray([1, 1]), 3, 400, t))
        for t in (2.0, 1e3)
    }
    walks = {t: np.concatenate([[1, 1], d]) for t, d in draws.items()}
    hits = {t: np.mean((w[1:-1] + w[:-2]) % 7 == w[2:]) for t, w in walks.items()}
    odds = np.exp(9 / 2)
    assert hits[2.0] == pytest.approx(odds / (odds + 6), abs=0.06)
    assert hits[1e3] == pytest.approx(1 / 7, abs=0.06)


@pytest.mark.slow
def test_command_writes_record_and_resumes(folder, capsys):
    out = folder / "new" / "gpt.json"
    argv = ["--data-dir", str(folder), *ARGUMENTS, "--out", str(out)]
    assert main([*argv, "--seeds", "3"]) == 0
    first = json.loads(out.read_text(encoding="utf-8"))
    assert main([*argv, "--seeds", "3", "4"]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["runs"][0] == first["runs"][0]
    assert [run["seed"] for run in record["runs"]] == [3, 4]
    assert record["runs"][0]["train_loss"] != record["runs"][1]["train_loss"]
    assert record["settings"]["steps"] == 20
    assert record["learning_rate"] == 0.1
    for name in ("validation_whole", "validation_first_windows", "last_train_loss"):
        values = [run[name] for run in record["runs"]]
        assert record["summary"][name]["mean"] == pytest.approx(np.mean(values))
        assert record["summary"][name]["error"] == pytest.approx(abs(values[0] - values[1]) / 2)
    assert record["summary"]["validation_first_windows"]["published"] == 1.8968
    for run in record["runs"]:
        assert len(run["sample"]) == 30
        assert set(run["sample"]) <= set(LETTERS)
        assert run["sample"] in out.with_suffix(".txt").read_text(encoding="utf-8")
    assert str(folder) not in out.read_text(encoding="utf-8")
    assert out.with_suffix(".png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert re.search(r"validation, the whole part +\d\.\d{4} +\d\.\d{4} +\d\.\d{4} ± ", printed)

    with pytest.raises(SystemExit):
        main([*argv, "--seeds", "3", "--optimizer", "muon"])
    assert "is of another protocol; pass --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(METHODS))
def test_every_optimizer_has_an_update(name):
    job = METHODS[name].job(TINY, 11)
    weights = jax.eval_shape(job.network.init, jax.random.key(0))
    state = jax.eval_shape(job.tx.init, weights)
    updates, _ = jax.eval_shape(job.tx.update, weights, state, weights)
    assert jax.tree.map(lambda x: x.shape, updates) == jax.tree.map(lambda x: x.shape, weights)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--steps", "0"], "'0' is not a whole number, 1 or more"),
        (["--batch", "1.5"], "'1.5' is not a whole number, 1 or more"),
        (["--seeds", "1", "1"], "1 given more than once"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--learning-rate", "-1"], "'-1' is not a positive number"),
        (["--temperature", "0"], "'0' is not a positive number"),
        (["--width", "10", "--heads", "4"], "10 is not an even multiple of the 4 heads"),
        (["--data-dir", "no/such"], "there is no folder no/such"),
        (["--data-dir", "empty"], "Shakespeare: found no"),
        (["--data-dir", "short"], "the text is too short"),
        (["--out", "gpt.txt"], "gpt.txt does not end in .json"),
    ],
)
def test_invalid_arguments_give_one_line_error(argv, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "short"):
        (tmp_path / name).mkdir()
    (tmp_path / "short" / "input.txt").write_text("a" * 99, encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert reason in err
