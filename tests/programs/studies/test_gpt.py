"""The character GPT: few steps of a tiny network on a small text."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import MODULA_SIX_STEP
from manifoldmuon.modules import Bond
from studies.datasets import batches, load_text, split_text, windows
from studies.gpt.methods import METHODS
from studies.gpt.sampling import sample
from studies.gpt.study import CharacterGPT
from studies.gpt.training import mean_loss, run

pytestmark = pytest.mark.slow

TINY = CharacterGPT(
    steps=20, batch=4, context=8, width=8, heads=2, blocks=2, sample=30, seeds=(3, 4)
)
LETTERS = "It was the best of times, it was the worst of times. " * 40


def test_text_is_split_and_encoded():
    text = split_text("letters", LETTERS)
    assert text.characters == "".join(sorted(set(LETTERS)))
    assert text.decode(text.train) + text.decode(text.validation) == LETTERS
    assert len(text.train) == int(0.9 * len(LETTERS))
    assert "lambda" in load_text("pydoc", None).decode(load_text("pydoc", None).train)


def test_windows_are_sampled_without_replacement():
    starts = batches(0, 23 - 3, steps=8, batch_size=5)
    first, second = starts.reshape(2, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first.tolist() != second.tolist()
    tokens = np.arange(100, 123)
    inputs, targets = windows(jnp.asarray(tokens), jnp.asarray(starts), 3)
    places = starts.reshape(-1, 1) + np.arange(3)
    np.testing.assert_array_equal(np.reshape(inputs, (-1, 3)), tokens[places])
    np.testing.assert_array_equal(np.reshape(targets, (-1, 3)), tokens[places + 1])


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


def test_constrained_gpt_learns_on_manifold():
    text = split_text("letters", LETTERS)
    found, weights = run(dataclasses.replace(TINY, optimizer="constrained"), text, 3)
    assert found["step"] == [TINY.steps] == [len(found["train_loss"])]
    assert np.mean(found["train_loss"][-5:]) < np.mean(found["train_loss"][:5]) - 0.2
    table, *matrices = (np.asarray(w, np.float64) for w in jax.tree.leaves(weights))
    values = [np.linalg.svd(w, compute_uv=False) / np.sqrt(w.shape[-2] / w.shape[-1])
              for w in matrices]  # fmt: skip
    worst = max(np.abs(x - 1).max() for x in (np.sqrt(np.mean(table**2, axis=1)), *values))
    assert worst <= 2e-6
    assert worst - 1e-6 <= found["distance"] <= 1e-5  # the distance of the worst step

    # The whole validation part, by a loop over adjacent windows.
    network, losses = METHODS["constrained"].network(TINY, len(text.characters)), []
    for start in range(0, len(text.validation) - 8, 8):
        scores = network.apply(weights, jnp.asarray(text.validation[start : start + 8]))
        scores = np.asarray(scores, np.float64)
        scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        losses.append(-scores[np.arange(8), text.validation[start + 1 : start + 9]].mean())
    assert found["validation_whole"] == pytest.approx(np.mean(losses), rel=1e-5)


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


@pytest.mark.parametrize("name", list(METHODS))
def test_every_optimizer_has_an_update(name):
    job = METHODS[name].job(TINY, 11)
    weights = jax.eval_shape(job.network.init, jax.random.key(0))
    state = jax.eval_shape(job.tx.init, weights)
    updates, _ = jax.eval_shape(job.tx.update, weights, state, weights)
    assert jax.tree.map(lambda x: x.shape, updates) == jax.tree.map(lambda x: x.shape, weights)


def test_short_text_raises(tmp_path):
    (tmp_path / "input.txt").write_text("a" * 99, encoding="utf-8")
    study = CharacterGPT(text="shakespeare", data_dir=tmp_path)
    with pytest.raises(ValueError, match="must have 65 characters or more"):
        study.run({"seed": 0})
