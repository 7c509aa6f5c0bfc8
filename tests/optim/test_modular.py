"""Optimizers that follow from architectures, against the modules' own duality map."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.modules import GPT, Linear, Module, ReLU
from manifoldmuon.norms import L1ToRMS, RMSToRMS

UNEVEN = Linear(2, 3) @ (2 * Linear(3, 3)) ** 2 @ ReLU() @ Linear(3, 4, mass=2.0)
FROZEN = Linear(2, 3, mass=0.0) @ Linear(3, 3)


def start(net: Module, seed: int = 0) -> Any:
    return net.init(jax.random.key(seed))


def random_like(tree: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


@pytest.mark.parametrize(
    "net", [UNEVEN, FROZEN, Linear(3, 2), UNEVEN.constrained()], ids=lambda net: net.describe()
)
def test_a_step_without_momentum_is_the_dual_of_the_gradient(net):
    params = start(net)
    grads = random_like(params)
    tx = optim.modular(0.5, net, momentum=None)

    @jax.jit
    def step(grads, params):
        return tx.update(grads, tx.init(params), params)[0], net.dualize(grads, params)

    updates, dual = step(grads, params)
    wanted = jax.tree.map(lambda w, a: -0.5 * a, params, dual)
    if net.geometry() != net.flat().geometry():
        wanted = jax.jit(optim.retract(net.geometry()).update)(wanted, (), params)[0]
    for found, expected in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_budgets_of_copies_multiply_each_copy():
    budgets = {"w": np.array([0.5, 2.0]).reshape(2, 1, 1), "b": np.float32(3.0)}
    updates = {"w": jnp.ones((2, 3, 4), jnp.bfloat16), "b": jnp.ones(())}
    scaled: Any = optim.scale_by_budget(budgets).update(updates, optax.EmptyState())[0]
    assert scaled["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled["w"][:, 1, 2], [0.5, 2.0])
    assert scaled["b"] == 3.0


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (np.ones((3, 1, 1)), ValueError, r"the budget of 'w' has shape \(3, 1, 1\)"),
        (np.ones((1, 2, 3, 4)), ValueError, r"the budget of 'w' has shape \(1, 2, 3, 4\)"),
        (np.array([1.0, -1.0]).reshape(2, 1, 1), ValueError, "must be finite and >= 0"),
        (np.array([1.0, np.inf]).reshape(2, 1, 1), ValueError, "must be finite and >= 0"),
        (np.ones((2, 1, 1), bool), TypeError, "the budget of 'w' has dtype bool"),
        (np.array(["a"]), TypeError, "the budget of 'w'"),
    ],
)
def test_errors_of_budgets_of_copies_name_the_path(budget, error, message):
    with pytest.raises(error, match=message):
        optim.scale_by_budget({"w": budget}).update({"w": jnp.ones((2, 3, 4))}, optax.EmptyState())


def test_an_architecture_is_no_schedule():
    tx = optax.inject_hyperparams(optim.modular)(learning_rate=0.5, architecture=UNEVEN)
    state: Any = tx.init(start(UNEVEN))
    assert set(state.hyperparams) == {"learning_rate", "momentum"}


def test_the_character_gpt():
    """Published constants, and `dualize` as static budgets times each leaf's own direction."""
    full = GPT(65, 128, 4, 4)
    assert full.mass == pytest.approx(7)
    assert full.sensitivity == pytest.approx(1)
    targets = sorted(round(budget, 4) for budget in jax.tree.leaves(full.budgets()))
    assert targets == [round(1 / 7, 4)] * 2 + [0.2381] * 3 + [0.7143] * 3

    net = GPT(5, 4, 2, 2)
    grads = random_like(jax.eval_shape(net.init, jax.random.key(0)))
    flat, structure = jax.tree.flatten(grads)
    assert structure == jax.tree.structure(net.geometry())
    dual = jax.tree.leaves(jax.jit(net.dualize)(grads))
    plan = zip(flat, jax.tree.leaves(net.geometry()), jax.tree.leaves(net.budgets()), strict=True)
    for found, (grad, manifold, budget) in zip(dual, plan, strict=True):
        np.testing.assert_allclose(found, budget * _direction(manifold, grad), rtol=1e-4, atol=1e-5)


def _direction(manifold: Any, grad: Any) -> np.ndarray:
    """The duality maps of matrices and of embedding tables, by NumPy."""
    grad = np.asarray(grad, np.float64)
    if manifold == Euclidean(L1ToRMS()):
        return grad / np.sqrt(np.mean(grad**2, axis=-1, keepdims=True))
    assert manifold == Euclidean(RMSToRMS())
    u, _, vt = np.linalg.svd(grad, full_matrices=False)
    return np.sqrt(grad.shape[-2] / grad.shape[-1]) * u @ vt
