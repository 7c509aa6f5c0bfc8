"""Sharded parameters on eight devices, on meshes with automatic or explicit axes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import Frobenius, MaxAbs, RMSToRMS
from manifoldmuon.testing import check_sharding
from tests.optim.instances import INSTANCES, Instance

# Eight devices: only the exhaustive run has these tests.
pytestmark = pytest.mark.slow

MESHES = {
    "automatic": ((8,), ("x",), (AxisType.Auto,)),
    "explicit": ((8,), ("x",), (AxisType.Explicit,)),
    "both": ((4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto)),
}
# Eight devices divide neither the three leaves of equal shape nor the axis of length 5.
SHAPES = {"m": {"1": (16, 8), "2": (16, 8), "3": (16, 8)}, "stack": (8, 5), "bias": (5,)}
LAYOUT = {
    "m": {"1": ("x", None), "2": ("x", None), "3": (None, "x")},
    "stack": ("x", None),
    "bias": (None,),
}
# A solver with a warm start puts dual variables into the state.
GEOMETRY = {"m": Stiefel(solver=DualAscent(steps=2)), "stack": Hypersphere(), "bias": Euclidean()}


def shardings(mesh: jax.sharding.Mesh) -> dict:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*spec)),
        LAYOUT,
        is_leaf=lambda node: isinstance(node, tuple),
    )


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "manifold_muon": (
        optim.manifold_muon,
        {"learning_rate": 0.1, "weight_decay": 0.1, "budgets": 0.5},
    ),
    "riemannian_sgd": (optim.riemannian_sgd, {"learning_rate": 0.1, "momentum": 0.9}),
    "normalize": (optim.normalize, {"base": optax.trace(0.9)}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_steps_match_single_device(mesh, name):
    instance = Instance(OPTIMIZERS[name][0], GEOMETRY, SHAPES, OPTIMIZERS[name][1])
    placed = shardings(jax.make_mesh(*MESHES[mesh]))
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_sharded_blocks_and_neurons_match_single_device(mesh):
    """An axis with two blocks is sharded over eight devices."""
    muon = Euclidean(RMSToRMS())
    geometry = {"fused": LaidOut(muon, Layout(out_blocks=2)), "kernel": muon.transposed()}
    instance = Instance(contrib.scale_by_neuron_rms, geometry, {"fused": (16, 8), "kernel": (8, 5)})
    spec = NamedSharding(jax.make_mesh(*MESHES[mesh]), PartitionSpec("x", None))
    placed = jax.tree.map(lambda _: spec, instance.params())
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


def test_tree_functions_keep_explicit_shardings():
    mesh = jax.make_mesh(*MESHES["explicit"])
    instance = Instance(optim.retract, GEOMETRY, SHAPES)
    params = instance.params()
    doubled = jax.tree.map(lambda x: 2 * x, params)

    @jax.jit
    def tour(doubled):
        projected = optim.project_tree(GEOMETRY, doubled)
        drawn = optim.init_tree(GEOMETRY, jax.random.key(3), doubled)
        return projected, drawn, optim.monitor_distance(GEOMETRY, doubled)

    found = tour(jax.device_put(doubled, shardings(mesh)))
    for wanted, got in zip(jax.tree.leaves(tour(doubled)), jax.tree.leaves(found), strict=True):
        assert jnp.allclose(jax.device_get(got), wanted, atol=1e-5)
    for got in found[:2]:
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(
            jax.typeof, jax.device_put(doubled, shardings(mesh))
        )


@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_init_tree_keeps_sharding(mesh):
    """From abstract arrays with shardings, and inside jit from arrays with another sharding."""
    spec = NamedSharding(jax.make_mesh(*MESHES[mesh]), PartitionSpec("x", None))
    shape = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=spec)
    drawn = optim.init_tree(Stiefel(), jax.random.key(0), {"w": shape})["w"]
    assert drawn.sharding == spec
    template = {"w": jnp.zeros((16, 4))}

    @functools.partial(jax.jit, out_shardings=spec)
    def inside(key):
        return optim.init_tree(Stiefel(), key, template)["w"]

    again = inside(jax.random.key(0))
    assert again.sharding == spec
    assert jnp.allclose(jax.device_get(drawn), jax.device_get(again), atol=1e-6)


# A leaf of each kind: another layout, stack, blocks, replicated, scalar, empty, and holes.
MIXED = {
    "laid out": ((8, 16), ("x",), Hypersphere(ndim=2).transposed()),
    "stack": ((2, 8, 5), (None, "x"), Hypersphere()),
    "fused": ((16, 8), ("x",), LaidOut(Euclidean(MaxAbs()), Layout(out_blocks=2))),
    "replicated": ((16, 8), (), Euclidean(MaxAbs())),
    "bias": ((8,), ("x",), Euclidean()),
    "scalar": ((), (), Euclidean(Frobenius(ndim=0))),
    "empty": ((0, 4), (), Hypersphere()),
}
ENTRIES: dict[Any, Any] = {name: entry for name, (_, _, entry) in MIXED.items()}
PLACED = optim.by_path(ENTRIES | {"*": Euclidean()})
HOLES = {"none": None, "masked": optax.MaskedNode()}
FLAT = optim.by_path(
    {"fused": Euclidean(RMSToRMS()), "scalar": ENTRIES["scalar"], "*": Euclidean()}
)
HEADS = optim.by_path({"fused": Layout(out_blocks=2), "*": None})
KEY = jax.random.key(0)
MATRICES = ("fused", "replicated")


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


def mixed(seed: int, mesh: Any = None) -> dict[str, Any]:
    """Draw a tree of random arrays, on a single device or on a mesh."""
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = dict(HOLES)
    for name, (shape, spec, _) in MIXED.items():
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        tree[name] = (
            x if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        )
    return tree


def update(make: Any, *args: Any, **options: Any) -> Any:
    """Return the updates of a transformation as a function of parameters and gradients."""

    def emitted(params, grads):
        tx = optax.with_extra_args_support(make(*args, **options))
        params = optim.project_tree(PLACED, params)
        given = {"grad": grads, "value": loss(params), "value_fn": loss}
        given["max_logits"] = {"fused": np.array([400.0, 1.0])}
        return tx.update(grads, tx.init(params), params, **given)[0]

    return emitted


def certificates(params: Any, grads: Any) -> Any:
    tx = optim.scale_by_steepest(PLACED)
    return optim.monitor(tx.update(grads, tx.init(params), params)[1])


def matrices(make: Any) -> Any:
    return lambda params, grads: make({name: params[name] for name in MATRICES})


TREE_FUNCTIONS = {
    "project_tree": lambda params, _: optim.project_tree(PLACED, params),
    "monitor_distance": lambda params, _: optim.monitor_distance(PLACED, params),
    "monitor_distance, flat": lambda params, _: optim.monitor_distance(FLAT, params),
    "init_tree": lambda params, _: optim.init_tree(PLACED, KEY, params),
    "init_semi_orthogonal": matrices(lambda p: optim.init_semi_orthogonal(Layout(), KEY, p)),
    "monitor": certificates,
    "scale_by_steepest": update(optim.scale_by_steepest, PLACED),
    "scale_by_budget": update(optim.scale_by_budget, 0.5),
    "scale_by_neuron_rms": update(contrib.scale_by_neuron_rms, PLACED),
    "agd": matrices(lambda p: (tx := optim.agd(Layout())).update(p, tx.init(p), p)[0]),
    "retract": update(optim.retract, PLACED),
    "tangent": update(optim.project_tangent, PLACED),
    "normalize": update(optim.normalize, optax.identity(), PLACED),
    "manifold_muon": update(optim.manifold_muon, 0.1, PLACED, weight_decay=0.1),
    "muon": update(optim.muon, 0.1, FLAT),
    "normuon": update(contrib.normuon, 0.1, FLAT),
    "riemannian_adam": update(optim.riemannian_adam, 0.1, PLACED),
    "riemannian_sgd": update(optim.riemannian_sgd, 0.1, PLACED),
    "with_qk_clip": update(contrib.with_qk_clip, optax.sgd(0.1), FLAT, HEADS),
    "with_master_copies": update(optim.with_master_copies, optim.riemannian_sgd(0.1, PLACED)),
}


@pytest.mark.parametrize(
    ("mesh", "where"),
    [("explicit", "outside"), ("explicit", "inside"), ("automatic", "inside, mesh set")],
)
@pytest.mark.parametrize("name", TREE_FUNCTIONS)
def test_tree_functions_on_mesh_match_single_device(name, mesh, where):
    """Outside and inside jit."""
    function, mesh = TREE_FUNCTIONS[name], jax.make_mesh(*MESHES[mesh])
    wanted = jax.tree.leaves(jax.jit(function)(mixed(0), mixed(1)))
    called = function if where == "outside" else jax.jit(function)
    placed = mixed(0, mesh), mixed(1, mesh)
    if where == "inside, mesh set":
        with jax.set_mesh(mesh):
            found = called(*placed)
    else:
        found = called(*placed)
    for got, want in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, atol=1e-5)


@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_tree_checks_accept_sharded_parameters(mesh):
    placed = mixed(0, jax.make_mesh(*MESHES[mesh]))
    assert optim.resolve_geometry(PLACED, placed)["stack"] == Hypersphere()
    assert str(optim.tabulate(PLACED, placed)) == str(optim.tabulate(PLACED, mixed(0)))
    optim.check_chain(optim.riemannian_sgd(0.01, PLACED), PLACED, placed)


# Rows of tests/optim/instances.py with a state that accept any geometry.
STATEFUL = ("steepest", "normalize", "neurons", "muon", "normuon", "riemannian_adam",
            "riemannian_sgd", "master copies")  # fmt: skip


@pytest.mark.parametrize("name", STATEFUL)
def test_float16_states_keep_their_types(name):
    """Inside and outside jit, from the first step on, as in Optax's `contrib/_sharding_test.py`.

    The parameters are a zero stack in float16, with rows sharded over an explicit mesh.
    """
    instance = INSTANCES[name]
    uniform = {k: v for k, v in instance.arguments.items() if not isinstance(v, dict)}
    tx: Any = dataclasses.replace(instance, geometry=Euclidean(RMSToRMS()), arguments=uniform).tx()
    mesh = jax.make_mesh(*MESHES["explicit"])
    assert tx.init({"w": jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)}) is not None
    with jax.set_mesh(mesh):
        params = {"w": jnp.zeros((2, 8, 4), jnp.float16, out_sharding=jax.P(None, "x"))}
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)
        _, stepped = tx.update(params, state, params)
        _, compiled = jax.jit(tx.update)(params, state, params)
        for found in (jax.jit(tx.init)(params), stepped, compiled):
            assert jax.tree.map(jax.typeof, found) == types


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX 0.8 keeps it on the devices")
def test_host_memory_state_gives_same_steps():
    mesh = jax.make_mesh(*MESHES["automatic"])
    spec = NamedSharding(mesh, PartitionSpec("x"))
    params = jax.device_put({"w": jnp.eye(16, 8)}, spec)
    grads = jax.device_put({"w": jax.random.normal(KEY, (16, 8))}, spec)
    tx = optim.manifold_muon(0.1, Stiefel(solver=DualAscent(steps=2)))
    device = jax.tree.map(lambda x: x.sharding, tx.init(params))
    host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), device)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, jax.device_put(state, device), params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def from_host(params, state):
        params, state = step(params, state)
        return params, jax.device_put(state, host)

    wanted, found = (params, tx.init(params)), (params, jax.device_put(tx.init(params), host))
    with jax.set_mesh(mesh):
        for _ in range(2):
            wanted, found = step(*wanted), from_host(*found)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(found[1])} == {"pinned_host"}
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(jax.device_get(x), jax.device_get(y))
