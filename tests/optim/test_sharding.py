"""Sharded parameters, on meshes of two and eight devices with automatic or explicit axes."""

import contextlib
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, LaidOut, Layout, Manifold, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar
from manifoldmuon.norms import Frobenius, MaxAbs, RMSToRMS
from manifoldmuon.testing import check_sharding
from tests.compiled import COMPILATIONS
from tests.optim.instances import WITH_OPTAX_MUON, Instance
from tests.optim.training import drawn

eight_devices = pytest.mark.slow  # only the exhaustive run has them

MESHES = {
    "automatic": ((8,), ("x",), (AxisType.Auto,)),
    "explicit": ((8,), ("x",), (AxisType.Explicit,)),
    "both": ((4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto)),
}
# Eight devices divide neither the three leaves of equal shape nor the axis of length 5.
SHAPES = {"m": {"1": (16, 8), "2": (16, 8), "3": (16, 8)}, "stack": (8, 5), "bias": (5,)}
DIVIDED, COLUMNS, WHOLE = (PartitionSpec(*spec) for spec in (["x"], [None, "x"], []))
LAYOUT = {"m": {"1": DIVIDED, "2": DIVIDED, "3": COLUMNS}, "stack": DIVIDED, "bias": WHOLE}
# A solver with a warm start puts dual variables into the state.
GEOMETRY = {"m": Stiefel(solver=DualAscent(steps=2)), "stack": Hypersphere(), "bias": Euclidean()}


def first_even_axis(mesh: jax.sharding.Mesh, x: jax.Array) -> NamedSharding:
    even = [axis for axis, size in enumerate(x.shape) if size and size % 2 == 0]
    spec = ["x" if even[:1] == [axis] else None for axis in range(x.ndim)]
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.slow_except("muon-Explicit")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("name", WITH_OPTAX_MUON)
def test_two_devices_give_the_updates_of_one(name, kind):
    mesh = jax.make_mesh((2,), ("x",), (getattr(AxisType, kind),))
    instance = WITH_OPTAX_MUON[name]
    params = instance.params()
    placed = jax.tree.map(functools.partial(first_even_axis, mesh), params)
    check_sharding(instance.tx(), params, instance.grads(), placed)


@eight_devices
@pytest.mark.parametrize("mesh", MESHES)
def test_uneven_counts_give_the_updates_of_one_device(mesh):
    arguments = {"learning_rate": 0.1, "weight_decay": 0.1, "budgets": 0.5}
    instance = Instance(optim.manifold_muon, GEOMETRY, SHAPES, arguments)
    placed = jax.tree.map(functools.partial(NamedSharding, jax.make_mesh(*MESHES[mesh])), LAYOUT)
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


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
KEY = jax.random.key(0)
MATRICES = ("fused", "replicated")


def mixed(seed: int, mesh: Any = None) -> dict[str, Any]:
    """Draw a tree of random arrays, on a single device or on a mesh."""
    arrays = drawn(seed, {name: shape for name, (shape, _, _) in MIXED.items()})
    specs = {name: PartitionSpec(*spec) for name, (_, spec, _) in MIXED.items()}
    places = mesh and {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return jax.device_put(arrays, places) | HOLES


def matrices(make: Any) -> Any:
    return lambda params, grads: make({name: params[name] for name in MATRICES})


STEEPEST = optim.scale_by_steepest(PLACED)
TREE_FUNCTIONS = {
    "project_tree": lambda params, _: optim.project_tree(PLACED, params),
    "monitor_distance": lambda params, _: optim.monitor_distance(PLACED, params),
    "monitor_distance, flat": lambda params, _: optim.monitor_distance(FLAT, params),
    "monitor_distance, radii": lambda params, grads: optim.monitor_distance(
        PLACED, params, optim.keep_norms(PLACED).init(grads)
    ),
    "init_tree": lambda params, _: optim.init_tree(PLACED, KEY, params),
    "init_semi_orthogonal": matrices(lambda p: optim.init_semi_orthogonal(Layout(), KEY, p)),
    "monitor": lambda params, grads: optim.monitor(
        STEEPEST.update(grads, STEEPEST.init(params), params)[1]
    ),
    "agd": matrices(lambda p: (tx := optim.agd(Layout())).update(p, tx.init(p), p)[0]),
}


@eight_devices
@pytest.mark.filterwarnings("ignore:project_tree. spheres of radius 1:UserWarning")
@pytest.mark.parametrize(
    ("mesh_name", "where"),
    [("explicit", "outside"), ("explicit", "inside"), ("automatic", "inside, mesh set")],
)
@pytest.mark.parametrize("name", TREE_FUNCTIONS)
def test_tree_functions_on_mesh_match_single_device(name, mesh_name, where):
    """Outside and inside jit."""
    function, mesh = TREE_FUNCTIONS[name], jax.make_mesh(*MESHES[mesh_name])
    wanted = jax.tree.leaves(jax.jit(function)(mixed(0), mixed(1)))
    called = function if where == "outside" else jax.jit(function)
    placed = mixed(0, mesh), mixed(1, mesh)
    with jax.set_mesh(mesh) if where == "inside, mesh set" else contextlib.nullcontext():
        found = called(*placed)
    for got, want in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, atol=1e-5)
    if name in ("project_tree", "init_tree") and (mesh_name, where) == ("explicit", "inside"):
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, placed[0])


@eight_devices
@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_tree_checks_accept_sharded_parameters(mesh):
    placed = mixed(0, jax.make_mesh(*MESHES[mesh]))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed
    )
    points = optim.init_tree(PLACED, KEY, shapes)
    assert jax.tree.map(jax.typeof, points) == jax.tree.map(jax.typeof, placed)
    assert points["stack"].sharding == placed["stack"].sharding
    assert optim.resolve_geometry(PLACED, placed)["stack"] == Hypersphere()
    assert str(optim.tabulate(PLACED, placed)) == str(optim.tabulate(PLACED, mixed(0)))
    optim.check_chain(optim.riemannian_sgd(0.01, PLACED), PLACED, placed)


# Mesh of four devices, leading axes, partition spec.
KEPT = {
    "stack, replicated": ((4,), (8,), ()),
    "stack, divided": ((4,), (8,), ("data",)),
    "stack, FSDP": ((4,), (8,), (None, "data")),
    "stack, second axis": ((2, 2), (8,), (None, None, "fsdp")),
    "stack, two axes": ((2, 2), (8,), (None, "data", "fsdp")),
    "stack, wrong guess": ((2, 2), (8,), ("fsdp",)),
    "leaves, replicated": ((2, 2), (), ()),
    "leaves, FSDP": ((4,), (), ("data",)),
    "leaves, two axes": ((2, 2), (), ("data", "fsdp")),
}


def copies_of(manifold: Manifold) -> Any:
    """Return a geometry that declares all leading axes as copies."""
    return lambda _, leaf: manifold.stacked(len(leaf.shape) - 2)


WARM = copies_of(Stiefel(solver=DualAscent(steps=2)))
POLAR, FIXED = copies_of(Stiefel(solver=ProjectedPolar())), copies_of(Hypersphere(ndim=2))
OPTIMIZERS = {
    "muon": optim.muon(0.02, copies_of(Euclidean(RMSToRMS()))),
    "manifold_muon": optim.manifold_muon(0.02, copies_of(Stiefel())),
    "manifold_muon, polar": optim.manifold_muon(0.02, POLAR),
    "manifold_muon, warm": optim.manifold_muon(0.02, WARM),
    "muonh": optim.muonh(0.02, FIXED),
    "adamh": optim.adamh(0.02, FIXED),
    "riemannian_sgd": optim.riemannian_sgd(0.02, POLAR, momentum=0.9),
    "riemannian_adam": optim.riemannian_adam(0.02, POLAR),
    "optax_muon": optim.optax_muon(
        0.02,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), tree
        ),
    ),
    "chain": optim.chain(
        optax.trace(0.9),
        optim.scale_by_steepest(POLAR),
        optax.scale_by_learning_rate(0.02),
        optim.retract(POLAR),
    ),
}


@pytest.mark.slow_except(
    "Auto-stack, replicated-muon",
    "Auto-stack, replicated-optax_muon",
    "Auto-stack, second axis-manifold_muon, polar",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_steps_keep_sharding_and_compile_once(kind, case, name, capfd):
    sizes, lead, spec = KEPT[case]
    tx, names = OPTIMIZERS[name], ("data", "fsdp")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, names, (getattr(AxisType, kind),) * len(sizes), devices=devices)
    weights = drawn(0, {f"w{i}": (*lead, 16, 8) for i in range(1 if lead else 4)})
    place = NamedSharding(mesh, PartitionSpec(*spec))
    params = jax.device_put(jax.tree.map(lambda x: np.linalg.qr(x)[0], weights), place)
    step = jax.jit(lambda *args: tx.update(*args))  # a cache of its own
    with jax.set_mesh(mesh):
        state = tx.init(params)
        start = jax.tree.map(lambda x: (x.sharding, x.ndim), state)
        updates, state = step(params, state, params)
        compiled = len(COMPILATIONS)
        for _ in range(2):
            updates, state = step(params, state, params)
    assert len(COMPILATIONS) == compiled > 0
    for x in jax.tree.leaves(updates):
        assert x.sharding.is_equivalent_to(place, x.ndim)
    jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(*y) or pytest.fail(f"{x}"), state, start)
    assert "rematerialization" not in capfd.readouterr().err
