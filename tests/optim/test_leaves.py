"""`map_leaves`: stacking, budgets and checks of the returned updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Stiefel


def test_map_leaves_stacks_selected_leaves():
    """With layouts and states by path; other leaves pass through."""
    geometry = {"a": Stiefel(), "b": Stiefel().transposed(), "bias": Euclidean()}
    params = {"a": jnp.eye(3, 2), "b": jnp.eye(2, 3), "bias": jnp.ones(2)}
    updates = jax.tree.map(lambda x: 2 * x, params)
    shapes = []

    def scale(manifold, point, update, factor):
        shapes.append(point.shape)
        return factor[..., None, None] * update, jnp.max(point, axis=(-2, -1))

    found, largest = optim.map_leaves(
        scale,
        geometry,
        updates,
        params,
        select=lambda manifold: manifold.constrained,
        carried={"a": jnp.array(3.0), "b": jnp.array(5.0)},
    )
    assert shapes == [(2, 3, 2)]  # a single call for both, in the manifold's layout
    assert {path: float(x) for path, x in largest.items()} == {"a": 1, "b": 1}
    for name, factor in {"a": 6, "b": 10, "bias": 2}.items():
        np.testing.assert_array_equal(found[name], factor * params[name])
    with pytest.raises(ValueError, match=r"map_leaves: the state has no entries for \['a', 'b'\]"):
        optim.map_leaves(scale, geometry, updates, params, carried={"bias": jnp.array(1.0)})


def test_cache_does_not_hide_type_errors():
    """`True == 1.0` in Python, so a cache by value would accept `True`."""
    updates = {"a": jnp.ones(2)}
    scaled: Any
    scaled, _ = optim.scale_by_budget({"a": 1.0}).update(updates, optax.EmptyState())
    np.testing.assert_array_equal(scaled["a"], 1)
    with pytest.raises(TypeError, match="the budget of 'a' is True"):
        optim.scale_by_budget({"a": True}).update(updates, optax.EmptyState())
    with pytest.raises(TypeError, match="the budget of 'a' is True"):
        optim.scale_by_budget(optim.by_path({"a": True})).update(updates, optax.EmptyState())


def test_budgets_may_be_traced():
    """Traced budgets are not cached."""

    @jax.jit
    def scale(budget, updates):
        return optim.scale_by_budget({"a": budget}).update(updates, optax.EmptyState())[0]

    for budget in (0.5, 2.0):
        np.testing.assert_array_equal(scale(budget, {"a": jnp.ones(2)})["a"], budget)


@pytest.mark.parametrize(
    "returned",
    [
        lambda point: point[..., :1],
        lambda point: [point],
        lambda point: (point, (), ()),
        lambda point: (point[0], ()),
    ],
    ids=["shape", "list", "three", "shape in a tuple"],
)
def test_map_leaves_rejects_invalid_results(returned):
    params = {name: jnp.eye(3, 2) for name in "ab"}
    with pytest.raises(ValueError, match="for a point of shape .* must return"):
        optim.map_leaves(lambda manifold, point, update: returned(point), Stiefel(), params, params)
