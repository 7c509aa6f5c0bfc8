"""Learning-rate transfer: summary of known drifts, parametrisations, and a plain training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from studies.networks.architectures import Perceptron, Residual, Transformer, gaussian_weights
from studies.networks.descent import Descent, late_loss
from studies.networks.methods import METHODS
from studies.networks.tasks import Pictures


def test_late_loss_averages_last_steps():
    losses = np.arange(20.0).reshape(2, 10)
    np.testing.assert_allclose(late_loss(losses), [8.5, 18.5])


def rms_divide(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def test_standard_residual_network_matches_numpy():
    """`x + f(x) / sqrt(L)`, with Gaussian weights of deviation 1/sqrt(fan_in)."""
    network = Residual(width=32, depth=3).standard(12, 5)
    weights = gaussian_weights(network, jax.random.key(0))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(weights)]
    first, *blocks, last = leaves
    x = np.random.default_rng(0).normal(size=(4, 12))
    h = x @ first.T
    for k in range(3):
        branch = h
        for layer in range(2):
            inner = blocks[0][k, layer] if blocks[0].ndim == 4 else blocks[layer][k]
            branch = np.abs(rms_divide(branch) @ inner.T)
            branch = branch - branch.mean(axis=-1, keepdims=True)
        h = h + branch / np.sqrt(3)
    found = jax.jit(network.apply)(weights, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, h @ last.T, atol=1e-4)
    for leaf in leaves:
        assert leaf.std() * np.sqrt(leaf.shape[-1]) == pytest.approx(1, rel=0.2)


@pytest.mark.slow
def test_standard_attention_divides_by_sqrt_head_dim():
    """In NumPy, for a single block with a zero MLP, two tokens and two heads of two entries."""
    network = Transformer(width=4, depth=1).standard(7, 7)
    weights = gaussian_weights(network, jax.random.key(1))
    leaves, structure = jax.tree.flatten(weights)
    leaves = [jnp.zeros_like(x) if x.shape == (1, 16, 4) else x for x in leaves]
    table, *attention = (np.asarray(leaf, np.float64) for leaf in leaves[:5])
    query, key, value, merge = (leaf[0] for leaf in attention)
    tokens = np.array([3, 5])
    h = table[tokens]
    x = rms_divide(h)
    turn = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in range(2)]
    heads = []
    for j in (0, 2):
        q, k, v = ((x @ w.T)[:, j : j + 2] for w in (query, key, value))
        q, k = (np.stack([turn[t] @ a[t] for t in range(2)]) for a in (q, k))
        scores = np.exp(q @ k.T / np.sqrt(2)) * np.tri(2)
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
    h = h + np.concatenate(heads, axis=1) @ merge.T / np.sqrt(2)
    expected = rms_divide(h) @ np.asarray(leaves[-1], np.float64).T
    found = jax.jit(network.apply)(structure.unflatten(leaves), jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert table.std() == pytest.approx(1, rel=0.4)


def test_training_matches_plain_loop():
    """For three steps of Adam; rate 0 leaves the weights unchanged."""
    task, method = Pictures(batch=8), METHODS["Adam"]
    network = method.network(Perceptron(width=6, depth=2), task.inputs, task.classes)
    descent = Descent(method, network, task, steps=3, early=2, multiplier=1.5)
    trained = descent.train([0.0, 0.25], seed=3)
    still, moved = (np.asarray(descent.changes(trained, 3)["2"])[k] for k in (0, 1))
    assert still == 0 < moved
    images, labels = task.parts().train
    tx = optax.inject_hyperparams(optax.adam)(0.25)

    @jax.jit
    def step(weights, state, x, y, k):
        def loss(weights):
            scores = jax.nn.log_softmax(1.5 * network.apply(weights, x))
            return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

        value, grads = jax.value_and_grad(loss)(weights)
        state.hyperparams["learning_rate"] = 0.25 * (1 - k / 3)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = descent.start(3)
    state = tx.init(weights)
    for k, chosen in enumerate(task.order(3, 3)):
        weights, state, value = step(weights, state, images[chosen], labels[chosen], k)
        np.testing.assert_allclose(trained.loss[1, k], value, rtol=2e-3)
    for ours, theirs in zip(jax.tree.leaves(trained.final), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(ours[1], theirs, atol=2e-3)
