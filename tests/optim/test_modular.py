"""Optimizers derived from architectures, against the paper's recursive definitions."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.modules import Linear, ReLU
from tests.modules import paper
from tests.modules.measure import random_like
from tests.optim.training import first_update

UNEVEN = Linear(2, 3) @ (2 * Linear(3, 3)) ** 2 @ ReLU() @ Linear(3, 4, mass=2.0)
FROZEN = Linear(2, 3, mass=0.0) @ Linear(3, 3)


@pytest.mark.parametrize("net", [UNEVEN, FROZEN], ids=["uneven", "frozen"])
def test_step_without_momentum_is_dual_gradient(net):
    params = net.init(jax.random.key(0))
    grads = random_like(params)
    tx = optim.modular(0.5, net, momentum=None)
    updates = first_update(tx, grads, params)
    wanted = jax.tree.leaves(paper.dualize(net, grads))
    for found, expected in zip(jax.tree.leaves(updates), wanted, strict=True):
        np.testing.assert_allclose(found, -0.5 * expected, atol=2e-6)


def test_constrained_step_matches_closed_form():
    """`msign(G W^T - W G^T) W` times the budget, then the polar retraction, in float64."""
    net = UNEVEN.constrained()
    params = net.init(jax.random.key(0))
    grads = random_like(params)
    tx = optim.modular(0.5, net, momentum=None)
    updates = first_update(tx, grads, params)
    leaves = [jax.tree.leaves(tree) for tree in (updates, params, grads, net.budgets())]
    for found, point, grad, budget in zip(*leaves, strict=True):
        w, g = (np.asarray(x, np.float64) for x in (point, grad))
        scale = np.sqrt(w.shape[-2] / w.shape[-1])
        if w.shape[-2] < w.shape[-1]:
            w, g, found = (np.swapaxes(x, -1, -2) for x in (w, g, np.asarray(found)))
        w = w / scale
        lift = g @ np.swapaxes(w, -1, -2) - w @ np.swapaxes(g, -1, -2)
        moved = polar(w - 0.5 * budget * polar(lift) @ w)
        np.testing.assert_allclose(found, scale * (moved - w), atol=5e-6)


def polar(x: np.ndarray) -> np.ndarray:
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return (u * (s > 1e-10)[..., None, :]) @ vt


def test_inject_hyperparams_keeps_architecture_static():
    tx = optax.inject_hyperparams(optim.modular)(learning_rate=0.5, architecture=UNEVEN)
    state: Any = tx.init(UNEVEN.init(jax.random.key(0)))
    assert set(state.hyperparams) == {"learning_rate", "momentum"}
