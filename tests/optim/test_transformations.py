"""Transformations and `map_leaves`, against direct calls, NumPy and brute force."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon._internal.trees.transformations import difference
from manifoldmuon.manifolds import Euclidean, LaidOut, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import RMSToRMS
from tests.optim.instances import INSTANCES
from tests.optim.training import drawn, train
from tests.tolerances import rounding


@pytest.mark.slow
def test_stacked_leaves_match_leaves_solved_alone():
    instance = INSTANCES["steepest"]
    tx, params, grads = instance.tx(), instance.params(), instance.grads()
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert set(state.dual) <= set(params) == set(state.gap) == set(state.residual)
    for name, entry in instance.geometry.items():
        laid_out = isinstance(entry, LaidOut)  # (in, out) kernels
        manifold = entry.manifold if laid_out else entry
        point, grad = (x.T if laid_out else x for x in (params[name], grads[name]))
        alone = jax.jit(manifold.steepest)(point, grad, manifold.init_dual(point.shape))
        found = updates[name].T if laid_out else updates[name]
        close = rounding(20, max(point.shape[-2:], default=1))  # products in two programs
        np.testing.assert_allclose(found, alone.direction, atol=close)
        np.testing.assert_allclose(state.gap[name], alone.gap, rtol=1e-4, atol=2e-6)
        np.testing.assert_allclose(state.residual[name], alone.residual, atol=2e-6)
    report = optim.monitor((state, optax.EmptyState()))
    assert report == {"residual": state.residual, "gap": state.gap}


@dataclasses.dataclass(frozen=True)
class Summed(Euclidean):
    """Sum gradients in the warm start."""

    def init_dual(self, shape):
        return jnp.zeros(shape[:-1])

    def steepest(self, point, grad, dual):
        return Euclidean().steepest(point, grad, dual)._replace(dual=dual + grad[..., 0])


def test_warm_starts_survive_nan_gradients():
    params = drawn(0, {"a": (2, 3), "b": (2, 3), "c": (3,)})
    grads = jax.tree.map(np.ones_like, params)
    batches = [grads, grads | {"a": np.full((2, 3), np.nan, np.float32)}]
    _, state = train(optim.scale_by_steepest(Summed()), params, batches)
    np.testing.assert_array_equal(state.dual["a"], [1.0, 1.0])
    np.testing.assert_array_equal(state.dual["b"], [2.0, 2.0])
    assert state.dual["c"] == 2.0
    assert np.isnan(state.gap["a"]).all()


def test_budgets_multiply_updates():
    updates = jax.tree.map(jnp.bfloat16, drawn(0, {"a": {"b": (2,), "c": (3,)}, "d": (4,)}))
    expected = {"a": {"b": 0.5, "c": 0.5}, "d": 2.0}  # powers of two, so without rounding
    for budgets in (
        {"a": 0.5, "d": 2},
        optim.by_path({"a/*": 0.5, "d": 2.0}),
        lambda path, leaf: 2.0 if leaf.shape == (4,) else 0.5,
    ):
        tx = optim.scale_by_budget(budgets)
        scaled, _ = tx.update(updates, tx.init(updates))
        wanted = jax.tree.map(lambda factor, x: factor * x, expected, updates)
        chex.assert_trees_all_equal(scaled, wanted)
        chex.assert_trees_all_equal_dtypes(scaled, updates)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_update_is_best_possible(dtype):
    """Against all updates within four units in the last place of the returned update."""
    point, target = jnp.asarray(drawn(0, (2000,)), dtype), drawn(1, (2000,))
    # Points and targets have the same sign and similar size, as in real steps.
    near = jnp.asarray(point, jnp.float32) * (1 + 0.3 * jnp.abs(target))
    update = difference(near, point)
    assert update.dtype == dtype
    bits = jax.lax.bitcast_convert_type(update, jnp.int16)[None] + jnp.arange(-4, 5)[:, None]
    others = jax.lax.bitcast_convert_type(bits.astype(jnp.int16), dtype)

    def miss(u):
        return np.abs(np.asarray(point + u, np.float64) - np.asarray(near, np.float64))

    best = np.nanmin(miss(others), axis=0)  # the neighbours of 0 in bits may be NaN
    np.testing.assert_array_equal(miss(update), best)


STATES = {
    "gaps": optim.scale_by_steepest(Euclidean()),
    "duals": optim.scale_by_steepest(Stiefel(solver=DualAscent()), track_gap=False),
    "vectors": optim.normalize(optax.identity(), Euclidean(RMSToRMS())),
    "moments": contrib.scale_by_neuron_rms(Euclidean(RMSToRMS())),
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_other_parameters_raises(name):
    tx, params = STATES[name], {"b": jnp.eye(3, 2)}
    with pytest.raises(ValueError, match="no entries for \\['b'\\]"):
        tx.update(params, tx.init({"a": params["b"]}), params)


def test_monitor_reads_nested_states():
    params = drawn(0, {"a": (4, 3), "b": (4, 3)})
    geometry = Euclidean(RMSToRMS())
    muon = optim.muon(0.1, geometry, track_gap=True)
    links: dict[Any, Any] = {"x": muon, "y": optim.scale_by_steepest(geometry)}
    tx = optax.MultiSteps(optax.partition(links, {"a": "x", "b": "y"}), 2)
    report = {name: set(found) for name, found in optim.monitor(tx.init(params)).items()}
    assert report == {"residual": {"a", "b"}, "gap": {"a", "b"}}
    with pytest.raises(ValueError, match="no scale_by_steepest"):
        optim.monitor(optax.adam(0.1).init(params))
    both = (links["y"].init(params), links["y"].init(params))
    with pytest.raises(ValueError, match="\\['a', 'b'\\]"):
        optim.monitor(both)


@pytest.mark.filterwarnings("ignore:.*project_tree")  # half of the weights lie off the manifold
def test_monitor_scalars_are_flat():
    geometry, params = Stiefel().stacked(), {"a": jnp.stack([jnp.eye(4, 3), 1.5 * jnp.eye(4, 3)])}
    tx = optim.scale_by_steepest(geometry)
    _, state = tx.update(drawn(0, {"a": (2, 4, 3)}), tx.init(params), params)
    found = jax.jit(lambda *a: optim.monitor_scalars(a[0], geometry, a[1]))(state, params)
    assert set(found) == {"gap/a", "residual/a", "distance/a"}
    assert float(found["gap/a"]) == float(optim.monitor(state)["gap"]["a"].max())
    assert float(found["distance/a"]) == pytest.approx(0.5, abs=1e-5)
    assert set(optim.monitor_scalars(state)) == {"gap/a", "residual/a"}


def test_map_leaves_stacks_selected_leaves():
    """With layouts and states by path; other leaves pass through."""
    geometry = {"a": Stiefel(), "b": Stiefel().transposed(), "bias": Euclidean()}
    params = {"a": jnp.eye(3, 2), "b": jnp.eye(2, 3), "bias": jnp.ones(2)}
    updates = jax.tree.map(lambda x: 2 * x, params)
    shapes = []

    def scale(manifold, point, update, factor):
        shapes.append(point.shape)
        return factor[..., None, None] * update, jnp.max(point, axis=(-2, -1))

    carried = {"a": jnp.array(3.0), "b": jnp.array(5.0)}
    found, largest = optim.map_leaves(
        scale, geometry, updates, params, select=lambda m: m.constrained, carried=carried
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
    scaled: Any = optim.scale_by_budget({"a": 1.0}).update(updates, optax.EmptyState())[0]
    np.testing.assert_array_equal(scaled["a"], 1)
    for budgets in ({"a": True}, optim.by_path({"a": True})):
        with pytest.raises(TypeError, match="the budget of 'a' is True"):
            optim.scale_by_budget(budgets).update(updates, optax.EmptyState())


def test_budgets_may_be_traced():
    """Traced budgets are not cached."""

    @jax.jit
    def scale(budget, updates):
        return optim.scale_by_budget({"a": budget}).update(updates, optax.EmptyState())[0]

    for budget in (0.5, 2.0):
        np.testing.assert_array_equal(scale(budget, {"a": jnp.ones(2)})["a"], budget)


INVALID = {
    "shape": lambda manifold, point, update: point[..., :1],
    "list": lambda manifold, point, update: [point],
    "three": lambda manifold, point, update: (point, (), ()),
    "shape in a tuple": lambda manifold, point, update: (point[0], ()),
}


@pytest.mark.parametrize("name", INVALID)
def test_map_leaves_rejects_invalid_results(name):
    params = {name: jnp.eye(3, 2) for name in "ab"}
    with pytest.raises(ValueError, match="for a point of shape .* must return"):
        optim.map_leaves(INVALID[name], Stiefel(), params, params)
