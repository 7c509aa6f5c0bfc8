"""Plasticity: a task stream by a plain loop, findings on known losses, and settings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from studies.classification import digits
from studies.datasets import batches
from studies.plasticity import BATCH, HEAD_RATE, METHODS, RIVAL, Plasticity

pytestmark = pytest.mark.slow

TINY = Plasticity(
    methods=(RIVAL, "MuonH"), tasks=2, parts=2, octaves=(0, 1), width=16, depth=2, seeds=(0, 1)
)


def test_stream_matches_plain_loop():
    study = dataclasses.replace(TINY, methods=(RIVAL, "Adam"))
    found = study.run({"method": "Adam", "seed": 1})
    data, rng = digits(1), np.random.default_rng(1)
    pixels = [rng.permutation(64) for _ in range(2)]
    keys = zip(jax.random.split(jax.random.key(1)), (64, 16), strict=True)
    hidden = [jax.random.normal(key, (16, before)) / np.sqrt(before) for key, before in keys]
    weights = [*hidden, jnp.zeros((10, 16))]

    def loss(weights, x, y):
        for matrix in weights[:-1]:
            x = np.sqrt(2) * jax.nn.relu(x @ matrix.T)
        scores = x @ weights[-1].T
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    rates = [2.0 ** METHODS["Adam"].centre] * 2 + [HEAD_RATE]
    tx = optax.scale_by_adam(0.9, 0.95)
    state, step = tx.init(weights), jax.jit(jax.value_and_grad(loss))
    for task in range(2):
        losses = []
        size = len(data.train_y)
        for rows in batches(1000 + task, size, size // BATCH, BATCH):
            value, grads = step(weights, data.train_x[rows][:, pixels[task]], data.train_y[rows])
            updates: Any
            updates, state = tx.update(grads, state)
            weights = [w - r * u for w, r, u in zip(weights, rates, updates, strict=True)]
            losses.append(float(value))
        np.testing.assert_allclose(found["losses"][0][task], np.mean(losses), rtol=1e-3)


@pytest.mark.parametrize("name", ["Stiefel", "rows", "AdamH"])
def test_constrained_methods_train(name):
    study = dataclasses.replace(TINY, methods=(RIVAL, name))
    first, last = np.array(study.run({"method": name, "seed": 0})["losses"]).T
    assert np.all(first < np.log(10))
    assert np.all(last < np.log(10))


class Shrunk(Plasticity):
    def _start(self, method, *sizes):
        start = super()._start(method, *sizes)
        return start | {"hidden": [0.7 * matrix for matrix in start["hidden"]]}


def test_factor_scales_kept_norm():
    """A fixed norm makes steps relative: a factor in the network equals smaller weights."""
    settings = dataclasses.asdict(TINY)
    found = Plasticity(**settings).run({"method": "MuonH, times 0.7", "seed": 2})["losses"]
    wanted = Shrunk(**settings).run({"method": "MuonH", "seed": 2})["losses"]
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
