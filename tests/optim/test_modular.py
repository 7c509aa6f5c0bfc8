"""Optimizers derived from architectures, against the paper's recursive definitions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.modules import Linear, Module, ReLU, gpt
from tests.modules import paper

UNEVEN = Linear(2, 3) @ (2 * Linear(3, 3)) ** 2 @ ReLU() @ Linear(3, 4, mass=2.0)
FROZEN = Linear(2, 3, mass=0.0) @ Linear(3, 3)


def start(net: Module, seed: int = 0) -> Any:
    return net.init(jax.random.key(seed))


def random_like(tree: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


@pytest.mark.parametrize("net", [UNEVEN, FROZEN], ids=["uneven", "frozen"])
def test_step_without_momentum_is_dual_gradient(net):
    params = start(net)
    grads = random_like(params)
    tx = optim.modular(0.5, net, momentum=None)
    updates = jax.jit(lambda g, w: tx.update(g, tx.init(w), w)[0])(grads, params)
    wanted = jax.tree.leaves(paper.dualize(net, grads))
    for found, expected in zip(jax.tree.leaves(updates), wanted, strict=True):
        np.testing.assert_allclose(found, -0.5 * expected, atol=2e-6)


def test_constrained_step_matches_closed_form():
    """`msign(G W^T - W G^T) W` times the budget, then the polar retraction, in float64."""
    net = UNEVEN.constrained()
    params = start(net)
    grads = random_like(params)
    tx = optim.modular(0.5, net, momentum=None)
    updates = jax.jit(lambda g, w: tx.update(g, tx.init(w), w)[0])(grads, params)
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


def test_budgets_per_copy_multiply_each_copy():
    budgets = {"w": np.array([0.5, 2.0]).reshape(2, 1, 1), "b": np.float32(3.0)}
    updates = {"w": jnp.ones((2, 3, 4), jnp.bfloat16), "b": jnp.ones(())}
    scaled: Any = optim.scale_by_budget(budgets).update(updates, optax.EmptyState())[0]
    assert scaled["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled["w"][:, 1, 2], [0.5, 2.0])
    assert scaled["b"] == 3.0


def test_inject_hyperparams_keeps_architecture_static():
    tx = optax.inject_hyperparams(optim.modular)(learning_rate=0.5, architecture=UNEVEN)
    state: Any = tx.init(start(UNEVEN))
    assert set(state.hyperparams) == {"learning_rate", "momentum"}


def test_character_gpt_matches_paper():
    """Published constants, and steps computed by the paper's recursion."""
    full = gpt(65, 128, 4, 4)
    assert full.mass == pytest.approx(7)
    assert full.sensitivity == pytest.approx(1)
    targets = sorted(round(budget, 4) for budget in jax.tree.leaves(full.budgets()))
    assert targets == [round(1 / 7, 4)] * 2 + [0.2381] * 3 + [0.7143] * 3

    net = gpt(5, 4, 2, 2)
    grads = random_like(jax.eval_shape(net.init, jax.random.key(0)))
    assert jax.tree.structure(grads) == jax.tree.structure(net.geometry())
    tx = optim.modular(1.0, net, momentum=None)
    updates = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])(grads)
    wanted = jax.tree.leaves(paper.dualize(net, grads))
    for found, expected in zip(jax.tree.leaves(updates), wanted, strict=True):
        np.testing.assert_allclose(found, -expected, rtol=1e-4, atol=1e-5)
