"""Weights that keep their initial norm, against the published formula in NumPy's float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.norms import RootRank
from manifoldmuon.optim import hyperball, keep_norms
from manifoldmuon.testing import check_sharding
from tests.linalg.instances import polar
from tests.optim.training import drawn, train

SPHERE = Hypersphere(ndim=2)
SHAPES = {"w": (5, 4), "kernel": (3, 5), "stack": (2, 3, 4, 3), "fused": (6, 3), "bias": (4,)}
GEOMETRY = {
    "w": SPHERE,
    "kernel": SPHERE.transposed(),
    "stack": SPHERE.stacked(2),
    "fused": LaidOut(SPHERE, Layout(out_blocks=2)),
    "bias": Euclidean(),
}
MATRICES = {name: shape for name, shape in SHAPES.items() if name != "bias"}


def norm(x: Any, keepdims: bool = True) -> np.ndarray:
    return np.linalg.norm(np.asarray(x, np.float64), axis=(-2, -1), keepdims=keepdims)


def published(start: Any, updates: list[Any], rate: float, radial: float = 1.0) -> np.ndarray:
    """Return the weights after these base updates, by the formula of arXiv:2606.16899."""
    weight, radius = start.astype(np.float64), norm(start)
    for update in updates:
        unit, step = weight / norm(weight), update.astype(np.float64)
        along = np.sum(unit * step, axis=(-2, -1), keepdims=True) * unit
        step = step - along + radial * along
        moved = weight - rate * radius * step / norm(step)
        weight = radius * moved / norm(moved)
    return weight


# In Marin's MuonH the experts of a layer shared a norm (marin #8621), as "joint" does on purpose.
FORMULA = GEOMETRY | {"rows": Hypersphere(), "joint": Hypersphere(ndim=3).stacked()}
FORMULA_SHAPES = SHAPES | {"rows": (5, 4), "joint": (2, 3, 4, 5)}
POINTS = {"fused": (2, 3, 3), "rows": (5, 1, 4), "joint": (2, 12, 5)}


def as_matrices(name: str, x: np.ndarray) -> np.ndarray:
    """Give every point the last two axes."""
    return x.reshape(POINTS.get(name, x.shape))


@pytest.mark.parametrize("radial", [0.044, pytest.param(0.0, marks=pytest.mark.slow)])
def test_step_matches_published_formula(radial):
    params, grads = drawn(0, FORMULA_SHAPES), drawn(1, FORMULA_SHAPES)
    rates = {name: 0.3 / (1 + i) for i, name in enumerate(FORMULA)}
    budgets = {name: rate / 0.3 for name, rate in rates.items()}
    tx = hyperball(optax.identity(), 0.3, FORMULA, radial=radial, budgets=budgets)
    found, _ = train(tx, params, [grads])
    bias = params["bias"] - rates["bias"] * grads["bias"]
    np.testing.assert_allclose(found.pop("bias"), bias, rtol=1e-6)
    for name, x in found.items():
        start, grad, end = (as_matrices(name, y) for y in (params[name], grads[name], x))
        wanted = published(start, [grad], rates[name], radial)
        np.testing.assert_allclose(end, wanted, rtol=2e-6, atol=5e-7)


def adam(grads: list[np.ndarray], b1: float = 0.9, b2: float = 0.999) -> list[np.ndarray]:
    m, v, found = np.zeros(grads[0].shape), np.zeros(grads[0].shape), []
    for t, grad in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * np.square(grad, dtype=np.float64)
        found.append(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8))
    return found


def muon(grads: list[np.ndarray], decay: float = 0.95) -> list[np.ndarray]:
    trace, found = np.zeros(grads[0].shape), []
    for grad in grads:
        trace = decay * trace + grad
        found.append(polar(decay * trace + grad))
    return found


NAMED = {
    "adamh": (functools.partial(optim.adamh, 0.1), adam),
    "muonh": (functools.partial(optim.muonh, 0.1, momentum=0.95, method=None), muon),
}


@pytest.mark.parametrize("name", NAMED)
def test_adamh_and_muonh_match_published_updates(name):
    """With layouts, global clipping, and `None` entries trained by the `rest` optimizer."""
    make, updates = NAMED[name]
    geometry = GEOMETRY | {"bias": None}
    params, batches = drawn(6, SHAPES), [drawn(30 + i, SHAPES) for i in range(4)]
    found, _ = train(make(geometry=geometry, rest=optax.sgd(0.1), clip=1.0), params, batches)
    sizes = [np.sqrt(sum(np.sum(np.square(x, dtype="f8")) for x in g.values())) for g in batches]
    clipped = [{k: x / size for k, x in g.items()} for g, size in zip(batches, sizes, strict=True)]
    for key in MATRICES:
        start, *steps, end = (as_matrices(key, x[key]) for x in (params, *clipped, found))
        wanted = published(start, updates(steps), 0.1)
        np.testing.assert_allclose(end, wanted, rtol=2e-4, atol=2e-5, err_msg=key)
    bias = params["bias"] - 0.1 * sum(g["bias"] for g in clipped)
    np.testing.assert_allclose(found["bias"], bias, rtol=1e-5)


def test_radial_update_does_not_move_weights():
    """Dividing the rounding error of a zero tangent part by its norm would give a full step."""
    weight = drawn(6, (5, 4))
    found, _ = train(hyperball(optax.identity(), 0.5, SPHERE, radial=0), weight, [weight])
    np.testing.assert_array_equal(found, weight)
    # The published step (radial=1) does not move them either, up to rounding.
    found, _ = train(hyperball(optax.identity(), 0.5, SPHERE), weight, [weight])
    np.testing.assert_allclose(found, weight, rtol=1e-6)


PLACES = {"w": ("x", "y"), "kernel": (None, "x"), "experts": (None, "x", None, "y")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_norms_count_each_shard_once(kind):
    """A norm of sharded matrices was several times too large in marin #8073."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (kind, kind))
    places = {k: NamedSharding(mesh, PartitionSpec(*spec)) for k, spec in PLACES.items()}
    shapes = {"w": (8, 6), "kernel": (5, 8), "experts": (2, 4, 3, 6)}
    geometry = {"w": SPHERE, "kernel": SPHERE.transposed(), "experts": SPHERE.stacked(2)}
    params, tx = drawn(8, shapes), hyperball(optax.trace(0.9), 0.1, geometry, radial=0.5)
    check_sharding(tx, params, drawn(9, shapes), places)
    radii = keep_norms(geometry).init(jax.device_put(params, places)).radius  # type: ignore
    for name, radius in radii.items():
        np.testing.assert_allclose(radius, norm(params[name], False), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_experts_are_not_gathered(kind):
    """A stack of experts was gathered on every device in marin #7512."""
    mesh = jax.make_mesh((8,), ("expert",), (kind,))
    place = NamedSharding(mesh, PartitionSpec(None, "expert"))
    params = jax.device_put(drawn(10, (2, 8, 4, 6)), place)
    tx = hyperball(optax.scale_by_adam(), 0.1, SPHERE.transposed().stacked(2), radial=0.5)
    with jax.set_mesh(mesh):
        step = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    moves = r"(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
    # Only the radii (2 x 8 numbers) may be gathered.
    found = re.findall(rf"= f32\[([\d,]*)\]\S* {moves}", str(step.as_text()))
    assert all(len(shape.split(",")) <= 2 for shape, _ in found), found


def test_init_takes_radius_from_given_weights():
    tx: Any = keep_norms(SPHERE)
    drifted, step = 2 * jnp.eye(4), 0.1 * jnp.ones((4, 4))
    for radius, start in ((6.0, 3 * jnp.eye(4)), (4.0, drifted)):
        state = tx.init(start)
        np.testing.assert_allclose(state.radius[""], radius)
        moved = drifted + tx.update(step, state, drifted)[0]
        np.testing.assert_allclose(np.linalg.norm(moved), radius, rtol=1e-6)


@pytest.mark.parametrize("entry", [0.0, 3e38, np.nan])
def test_zero_or_nonfinite_norms_raise(entry):
    params = {"w": jnp.ones((2, 3)), "out": jnp.full((2, 3, 2), entry)}
    geometry = {"w": SPHERE, "out": SPHERE.stacked()}
    tx, words = keep_norms(geometry), r"keep_norms: \['out'\] have weights whose norm is zero"
    with pytest.raises(ValueError, match=words):
        tx.init(params)
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(tx.init)(params))
    unchecked = optim.start_anywhere(tx).init
    for init in (unchecked, jax.jit(unchecked)):
        state: Any = init(params)
        assert np.isfinite(state.radius["w"])
        assert np.all(np.isnan(state.radius["out"]))


def test_explicit_radius_allows_zero_weights():
    zero = {"w": jnp.ones((2, 3)), "out": jnp.zeros((2, 3, 2))}
    radius = optim.by_path({"out": RootRank(3.0), "**": None})
    geometry = {"w": SPHERE, "out": SPHERE.stacked()}
    tx = hyperball(optax.identity(), 0.1, geometry, radius=radius)
    found, _ = train(tx, zero, [{"w": jnp.ones((2, 3)), "out": jnp.ones((2, 3, 2))}])
    np.testing.assert_allclose(norm(found["out"]), 3 * np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found["w"]), np.sqrt(6), rtol=1e-6)


def test_nan_gradient_stays_in_its_matrix():
    params, grads = drawn(14, SHAPES), drawn(15, SHAPES)
    grads["stack"][0, 1, 0, 0] = np.nan
    found, state = train(hyperball(optax.identity(), 0.1, GEOMETRY), params, [grads])
    bad = np.isnan(found.pop("stack"))
    assert np.all(bad[0, 1])
    assert np.sum(bad) == 12
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((found, state)))


BLOCKS = GEOMETRY | {"qkv": LaidOut(SPHERE, Layout(out_blocks=(3, 2, 1))), "rest": None}
REST = optax.adamw(0.1)
NESTED = {
    "muonh": optim.muonh(0.1, BLOCKS | {"bias": None}, rest=REST, clip=1.0),
    "adamh": optim.adamh(0.1, BLOCKS | {"bias": None}, rest=REST),
    "MultiSteps": optax.MultiSteps(optim.hybrid(keep_norms(BLOCKS), BLOCKS, REST), 2),
    "master copies": optim.with_master_copies(optim.hybrid(keep_norms(BLOCKS), BLOCKS, REST)),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda rate: optim.muonh(rate, BLOCKS | {"bias": None}, rest=REST)
    )(0.1),
}


@pytest.mark.slow_except("adamh", "inject_hyperparams", "MultiSteps", "master copies")
@pytest.mark.parametrize("name", NESTED)
def test_distances_are_relative_to_radii(name):
    shapes = SHAPES | {"qkv": (6, 3), "rest": (3,)}
    start, end = drawn(23, shapes), drawn(24, shapes)
    state, wanted = NESTED[name].init(start), {}
    if name == "master copies":
        state = state._replace(copies=end)
    for path in MATRICES:
        before, after = (norm(as_matrices(path, x[path])) for x in (start, end))
        wanted[path] = np.max(np.abs(after / before - 1))
    for i, rows in enumerate([slice(0, 3), slice(3, 5), slice(5, 6)]):
        wanted[f"qkv/{i}"] = np.abs(norm(end["qkv"][rows]) / norm(start["qkv"][rows]) - 1).item()
    found = jax.jit(lambda *a: optim.monitor_distance(BLOCKS, *a))(end, state)
    assert found.pop("bias") == 0.0
    assert found.keys() == wanted.keys()
    scalars = optim.monitor_scalars(state, BLOCKS, end)
    for path, distance in found.items():
        np.testing.assert_allclose(distance, wanted[path], rtol=2e-5, err_msg=path)
        np.testing.assert_allclose(scalars[f"distance/{path}"], distance, rtol=1e-6)


def test_distances_without_radius_are_from_the_manifold():
    """Two optimizers: one keeps the norm of `a`, the other a Stiefel matrix and a unit sphere."""
    params = {"a": 3 * jnp.eye(4), "b": 2 * jnp.eye(4, 3), "c": 2 * jnp.eye(4)}
    geometry = {"a": SPHERE, "b": Stiefel(), "c": SPHERE}
    links: Any = {"keep": keep_norms(SPHERE), "set": optax.identity()}
    tx = optax.partition(links, {"a": "keep", "b": "set", "c": "set"})
    found = optim.monitor_distance(geometry, params, tx.init(params))
    for path, wanted in {"a": 0, "b": 1, "c": 3}.items():
        np.testing.assert_allclose(found[path], wanted, atol=1e-6)


def test_radii_of_another_geometry_raise():
    params = drawn(25, {"w": (5, 4), "v": (5, 4)})
    state: Any = keep_norms({"w": SPHERE, "v": SPHERE}).init(params)
    for other in (Hypersphere(), Stiefel(), LaidOut(SPHERE, Layout(out_blocks=5))):
        with pytest.raises(ValueError, match=r"keeps radii of \['w'\], which are not these points"):
            optim.monitor_distance({"w": other, "v": SPHERE}, params, state)
    with pytest.raises(ValueError, match=r"keeps radii of \['v'\], which are not these points"):
        optim.monitor_distance(SPHERE, {"w": params["w"]}, state)
    with pytest.raises(ValueError, match=r"two KeepNormsState report on \['v', 'w'\]"):
        optim.monitor_distance(SPHERE, params, (state, state))
    masked = {"w": params["w"], "v": optax.MaskedNode()}
    assert optim.monitor_distance(SPHERE, masked, state).keys() == {"w"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_norms_do_not_drift_over_100000_steps(dtype):
    """The radius is stored in the state; recomputing it each step accumulates rounding errors."""
    start = (3 * jax.random.normal(jax.random.key(0), (2, 8, 8))).astype(dtype)
    tx = hyperball(optax.identity(), 0.02, SPHERE.stacked())

    def run(update):
        def step(i, carry):
            weight, state = carry
            grad = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), start.shape, dtype)
            updates, state = update(grad, state, weight)
            return weight + updates, state

        return jax.jit(lambda c: jax.lax.fori_loop(0, 100_000, step, c)[0])((start, tx.init(start)))

    def measured_anew(grad, state, weight):
        return tx.update(grad, tx.init(weight), weight)[0], state

    def drift(weight):
        return np.max(np.abs(norm(weight) / norm(start) - 1))

    kept, anew = drift(run(tx.update)), drift(run(measured_anew))
    # Rounding of a single step: 64 entries (half rounded up) and the norm itself.
    eps, of_sums = (float(jnp.finfo(x).eps) for x in (dtype, jnp.float32))
    assert kept < eps / 8 + 2 * of_sums
    assert anew > 100 * kept
