"""Order of transformations in a chain, and aliases with the right order."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.linalg import DEFAULT_MSIGN
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import Spectral
from tests.compiled import ask
from tests.optim.instances import abstract
from tests.optim.training import drawn, first_update, train

W = Stiefel(solver=ProjectedPolar())
GEOMETRY = {"w": W, "b": Euclidean()}
SHAPES = abstract({"w": (6, 3), "b": (4,)})
RATE = optax.scale_by_learning_rate(0.1)


def start() -> Any:
    return jax.jit(lambda: optim.init_tree(GEOMETRY, jax.random.key(0), SHAPES))()


def test_weight_decay_skips_constrained_leaves():
    geometry = {"w": Hypersphere(), "b": Euclidean()}
    params = {"w": jnp.array([0.6, 0.8]), "b": jnp.array([1.0, 2.0])}
    for decay in (0.3, lambda count: 0.3):
        tx = optim.manifold_muon(0.1, geometry, weight_decay=decay)
        updates = first_update(tx, jax.tree.map(jnp.zeros_like, params), params)
        assert not jnp.any(updates["w"])
        np.testing.assert_allclose(updates["b"], -0.03 * params["b"], rtol=1e-6)


FORMS = {
    "manifold": lambda flat: flat,
    "function": lambda flat: lambda path, leaf: flat,
    "patterns": lambda flat: optim.by_path({"**": flat}),
}


@pytest.mark.parametrize("form", FORMS)
def test_muon_keeps_the_method_of_a_norm(form):
    grads = jnp.float32(np.diag([1.0, 1e-3]))
    params = jnp.zeros_like(grads)

    def smallest(norm, **options):
        tx = optim.muon(1.0, FORMS[form](Euclidean(norm)), None, **options)
        return -float(first_update(tx, grads, params)[1, 1])

    assert smallest(Spectral()) < 0.5
    assert smallest(Spectral(DEFAULT_MSIGN)) == pytest.approx(1, abs=1e-5)
    assert smallest(Spectral(), method=None) == pytest.approx(1, abs=1e-5)


SPHERE = {"w": Hypersphere(), "b": Euclidean()}


@pytest.mark.slow
def test_chain_accepts_second_retract_last():
    """Needed after a line search, and to repair wrappers that leave the manifold."""
    wrapped = optax.masked(optim.manifold_muon(0.1, SPHERE), {"w": True, "b": False})
    rest = optax.masked(RATE, {"w": False, "b": True})
    tx = optim.chain(wrapped, rest, optax.scale(2.0), optim.retract(SPHERE))
    optim.check_chain(tx, SPHERE, SHAPES)


@pytest.mark.slow
def test_check_chain_supports_line_search():
    def loss(params):
        return sum(jnp.sum(jnp.square(x - 1)) for x in jax.tree.leaves(params))

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    links = optim.scale_by_steepest(SPHERE), optax.scale(-1.0), search
    with pytest.raises(ValueError, match="are off their manifold"):
        optim.check_chain(optax.chain(*links), SPHERE, SHAPES, value_fn=loss)
    whole = optim.chain(*links, optim.retract(SPHERE))
    optim.check_chain(whole, SPHERE, SHAPES, value_fn=loss)


@pytest.mark.slow
def test_check_chain_forwards_extra_arguments():
    def update(updates, state, params=None, *, factor=1.0, **extra_args):
        assert extra_args == {"value": 2.0}
        return jax.tree.map(lambda x: factor * x, updates), state

    times = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optim.chain(times, optim.manifold_muon(0.1, SPHERE))
    optim.check_chain(tx, SPHERE, SHAPES, factor=3.0, value=2.0)


def test_check_chain_raises_without_movement_or_with_nan():
    with pytest.raises(ValueError, match="no parameter changed"):
        optim.check_chain(optim.manifold_muon(0.0, GEOMETRY), GEOMETRY, SHAPES)
    with pytest.raises(ValueError, match="distance {'v': nan}"):
        optim.check_chain(optax.scale(jnp.nan), Hypersphere(), abstract({"v": (3,)}))


def test_injected_learning_rate_can_be_changed():
    make = optax.inject_hyperparams(optim.manifold_muon)
    tx = make(learning_rate=0.1, geometry=GEOMETRY, weight_decay=0.1, clip=1.0)
    params = start()
    state: Any = tx.init(params)
    assert set(state.hyperparams) == {"learning_rate", "momentum", "weight_decay", "clip"}
    state.hyperparams["learning_rate"] = jnp.zeros(())
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert not any(jnp.any(u) for u in jax.tree.leaves(updates))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, np.array([[[0.5]], [[2.0]]])], ids=["number", "each"])
def test_alias_equals_handwritten_chain(share):
    """Matrices of a stack may have separate budgets."""
    geometry = {"w": Stiefel(), "stack": Stiefel(2.0).stacked(), "bias": Euclidean()}
    budgets = {"w": 3.0, "stack": share, "bias": 2.0}
    rate = optax.linear_schedule(0.1, 0.2, 2)
    shapes = {"w": (6, 3), "stack": (2, 4, 8), "bias": (5,)}
    params, *batches = (drawn(seed, shapes) for seed in range(3))
    params = ask(lambda params: optim.project_tree(geometry, params), params)
    links = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.trace(0.95, True, "float32"),
        optim.scale_by_steepest(geometry),
        optim.scale_by_budget(budgets),
        optax.add_decayed_weights(0.1, {"w": False, "stack": False, "bias": True}),
        optax.scale_by_learning_rate(rate),
        optim.retract(geometry),
    )
    alias = optim.manifold_muon(rate, geometry, clip=1.0, budgets=budgets, weight_decay=0.1)
    answers = []
    for tx in (alias, links):
        moved, state = train(tx, params, batches)
        answers.append((moved, optim.monitor(jax.tree.map(jnp.asarray, state))))
    for one, other in zip(*map(jax.tree.leaves, answers), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


TANGENT, RETRACT = optim.project_tangent(GEOMETRY), optim.retract(GEOMETRY)
ASCENDING: dict[str, Any] = {
    "no rate": optim.chain(TANGENT, RETRACT),
    "two rates": optim.chain(optax.adam(0.1), TANGENT, RATE, RETRACT),
    "masked leaves": optax.masked(optim.manifold_muon(0.1, GEOMETRY), {"w": True, "b": False}),
}


@pytest.mark.parametrize("name", ASCENDING)
def test_check_chain_rejects_ascent(name):
    with pytest.raises(ValueError, match="check_chain: the updates ascend"):
        optim.check_chain(ASCENDING[name], GEOMETRY, SHAPES)


def test_long_steps_on_manifold_warn():
    tx, halves = optim.manifold_muon, {"w": np.full((1, 1), 0.5), "b": jnp.array(9.0)}
    for long in (
        tx(3.0, GEOMETRY),
        tx(optax.constant_schedule(3.0), GEOMETRY),
        tx(6.0, GEOMETRY, budgets=halves),
        tx(0.1, GEOMETRY, budgets=30.0),
    ):
        with pytest.warns(UserWarning, match="a learning rate of 3, budgets included, turns"):
            long.init(start())
    with warnings.catch_warnings(action="error"):
        tx(0.5, GEOMETRY).init(start())
        tx(1.9, GEOMETRY, budgets=halves).init(start())
        optim.muon(3.0, {"w": Euclidean(), "b": Euclidean()}).init(start())
