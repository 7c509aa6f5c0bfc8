"""Outputs of the transformations, against direct calls, NumPy and brute force."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon._internal.trees.transformations import difference
from manifoldmuon.manifolds import Euclidean, LaidOut, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import RMSToRMS
from tests.optim.instances import INSTANCES, abstract
from tests.tolerances import rounding


def drawn(shapes: Any, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    leaves, treedef = jax.tree.flatten(abstract(shapes))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [jax.random.normal(k, x.shape, dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


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
    params = drawn({"a": (2, 3), "b": (2, 3), "c": (3,)})
    tx = optim.scale_by_steepest(Summed())
    update = jax.jit(tx.update)
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    _, state = update(grads, state, params)
    _, state = update(grads | {"a": jnp.full((2, 3), jnp.nan)}, state, params)
    np.testing.assert_array_equal(state.dual["a"], [1.0, 1.0])
    np.testing.assert_array_equal(state.dual["b"], [2.0, 2.0])
    assert state.dual["c"] == 2.0
    assert np.isnan(state.gap["a"]).all()


def test_budgets_multiply_updates():
    updates = drawn({"a": {"b": (2,), "c": (3,)}, "d": (4,)}, dtype=jnp.bfloat16)
    expected = {"a/b": 0.5, "a/c": 0.5, "d": 2.0}
    for budgets in (
        {"a": 0.5, "d": 2},
        optim.by_path({"a/*": 0.5, "d": 2.0}),
        lambda path, leaf: 2.0 if leaf.shape == (4,) else 0.5,
    ):
        tx = optim.scale_by_budget(budgets)
        scaled, _ = tx.update(updates, tx.init(updates))
        pairs = jax.tree_util.tree_flatten_with_path(scaled)[0]
        for (path, leaf), before in zip(pairs, jax.tree.leaves(updates), strict=True):
            assert leaf.dtype == jnp.bfloat16
            wanted = np.asarray(before, np.float32) * expected[path_string(path)]
            np.testing.assert_array_equal(np.asarray(leaf, np.float32), wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_update_is_best_possible(dtype):
    """Against all updates within four units in the last place of the returned update."""
    point = drawn((2000,), 0, dtype)
    target = drawn((2000,), 1)
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


@pytest.mark.parametrize(
    "tx",
    [
        optim.scale_by_steepest(Euclidean()),
        optim.scale_by_steepest(Stiefel(solver=DualAscent()), track_gap=False),
        optim.normalize(optax.identity(), Euclidean(RMSToRMS())),
        contrib.scale_by_neuron_rms(Euclidean(RMSToRMS())),
    ],
    ids=["gaps", "duals", "vectors", "moments"],
)
def test_state_of_other_parameters_raises(tx):
    params = {"b": jnp.eye(3, 2)}
    with pytest.raises(ValueError, match="no entries for \\['b'\\]"):
        tx.update(params, tx.init({"a": params["b"]}), params)


def test_monitor_reads_nested_states():
    params = drawn({"a": (4, 3), "b": (4, 3)})
    geometry = Euclidean(RMSToRMS())
    muon = optim.muon(0.1, geometry, track_gap=True)
    links: dict[Any, Any] = {"x": muon, "y": optim.scale_by_steepest(geometry)}
    tx = optax.MultiSteps(optax.partition(links, {"a": "x", "b": "y"}), 2)
    report = optim.monitor(tx.init(params))
    assert {name: set(found) for name, found in report.items()} == {
        "residual": {"a", "b"},
        "gap": {"a", "b"},
    }
    with pytest.raises(ValueError, match="no scale_by_steepest"):
        optim.monitor(optax.adam(0.1).init(params))
    both = (links["y"].init(params), links["y"].init(params))
    with pytest.raises(ValueError, match="\\['a', 'b'\\]"):
        optim.monitor(both)


@pytest.mark.filterwarnings("ignore:.*project_tree")  # half of the weights lie off the manifold
def test_monitor_scalars_are_flat():
    geometry, params = Stiefel().stacked(), {"a": jnp.stack([jnp.eye(4, 3), 1.5 * jnp.eye(4, 3)])}
    tx = optim.scale_by_steepest(geometry)
    _, state = tx.update(drawn({"a": (2, 4, 3)}), tx.init(params), params)
    found = jax.jit(lambda *a: optim.monitor_scalars(a[0], geometry, a[1]))(state, params)
    assert set(found) == {"gap/a", "residual/a", "distance/a"}
    assert float(found["gap/a"]) == float(optim.monitor(state)["gap"]["a"].max())
    assert float(found["distance/a"]) == pytest.approx(0.5, abs=1e-5)
    assert set(optim.monitor_scalars(state)) == {"gap/a", "residual/a"}
