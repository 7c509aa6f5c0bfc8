"""Parameter trees that are callable modules must not be mistaken for functions."""

from typing import Any

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.minimize import minimize


class Struct(flax.struct.PyTreeNode):
    """A Linen-style module with parameters as fields."""

    kernel: Any
    bias: Any

    def __call__(self, x):
        raise AssertionError("a tree of parameters was called")


MODULES = {
    "equinox": lambda: eqx.filter(eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), eqx.is_array),
    "nnx": lambda: nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param),
    "struct": lambda: Struct(jnp.eye(4, 3), jnp.zeros(3)),
}


def tree_of(params: Any, matrix: Any, other: Any) -> Any:
    return jax.tree.map(lambda x: matrix if x.ndim == 2 else other, params)


@pytest.fixture(params=MODULES)
def params(request) -> Any:
    given = MODULES[request.param]()
    return optim.project_tree(tree_of(given, Stiefel(), Euclidean()), given)


@pytest.mark.slow_except("nnx", "struct")
def test_callable_geometry_tree_matches_function(params):
    updates = []
    for spec in (
        tree_of(params, Stiefel(), Euclidean()),
        lambda path, leaf: Stiefel() if len(leaf.shape) == 2 else Euclidean(),
    ):
        tx = optim.manifold_muon(0.1, spec, budgets=tree_of(params, 2.0, 1.0), weight_decay=0.1)
        updates.append(tx.update(params, tx.init(params), params)[0])
    chex.assert_trees_all_equal(*updates)


@pytest.mark.slow_except("struct")
def test_hybrid_splits_callable_modules(params):
    geometry = tree_of(params, Stiefel(), None)
    tx = optim.hybrid(optim.manifold_muon(0.1, geometry), geometry, optax.sgd(0.5))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    for update, param in zip(*map(jax.tree.leaves, (updates, params)), strict=True):
        if param.ndim == 2:
            assert 0 < np.abs(update).max() < 0.4
        else:
            np.testing.assert_array_equal(update, np.full(param.shape, -0.5, np.float32))


@pytest.mark.slow
def test_minimize_accepts_callable_modules(params):
    geometry = tree_of(params, Stiefel(), Euclidean())
    target = jax.tree.map(lambda x: x + 0.1, params)

    def cost(point):
        gaps = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), point, target)
        return sum(jax.tree.leaves(gaps), jnp.zeros(()))

    found = minimize(cost, geometry, params)
    assert jax.tree.structure(found.point) == jax.tree.structure(params)
    nearest = optim.project_tree(geometry, target)
    assert cost(found.point) <= cost(nearest) * (1 + 1e-5)
