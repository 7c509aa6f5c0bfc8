"""Sharded parameters, on meshes of two and eight devices with automatic or explicit axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.norms import Frobenius, MaxAbs, RMSToRMS
from manifoldmuon.testing import check_sharding
from tests.optim.instances import INSTANCES, Instance

eight_devices = pytest.mark.slow  # only the exhaustive run has them

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


def first_even_axis(mesh: jax.sharding.Mesh, x: jax.Array) -> NamedSharding:
    even = [axis for axis, size in enumerate(x.shape) if size and size % 2 == 0]
    spec = ["x" if even[:1] == [axis] else None for axis in range(x.ndim)]
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.slow_except("muon-Explicit", "manifold_muon-Auto")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("name", INSTANCES)
def test_two_devices_give_the_updates_of_one(name, kind):
    mesh = jax.make_mesh((2,), ("x",), (getattr(AxisType, kind),))
    instance = INSTANCES[name]
    params = instance.params()
    placed = jax.tree.map(functools.partial(first_even_axis, mesh), params)
    check_sharding(instance.tx(), params, instance.grads(), placed)


@eight_devices
@pytest.mark.parametrize("mesh", MESHES)
def test_uneven_counts_give_the_updates_of_one_device(mesh):
    arguments = {"learning_rate": 0.1, "weight_decay": 0.1, "budgets": 0.5}
    instance = Instance(optim.manifold_muon, GEOMETRY, SHAPES, arguments)
    placed = shardings(jax.make_mesh(*MESHES[mesh]))
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


@eight_devices
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
KEY = jax.random.key(0)
MATRICES = ("fused", "replicated")


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


def certificates(params: Any, grads: Any) -> Any:
    tx = optim.scale_by_steepest(PLACED)
    return optim.monitor(tx.update(grads, tx.init(params), params)[1])


def matrices(make: Any) -> Any:
    return lambda params, grads: make({name: params[name] for name in MATRICES})


TREE_FUNCTIONS = {
    "project_tree": lambda params, _: optim.project_tree(PLACED, params),
    "monitor_distance": lambda params, _: optim.monitor_distance(PLACED, params),
    "monitor_distance, flat": lambda params, _: optim.monitor_distance(FLAT, params),
    "monitor_distance, radii": lambda params, grads: optim.monitor_distance(
        PLACED, params, optim.keep_norms(PLACED).init(grads)
    ),
    "init_tree": lambda params, _: optim.init_tree(PLACED, KEY, params),
    "init_semi_orthogonal": matrices(lambda p: optim.init_semi_orthogonal(Layout(), KEY, p)),
    "monitor": certificates,
    "agd": matrices(lambda p: (tx := optim.agd(Layout())).update(p, tx.init(p), p)[0]),
}


@eight_devices
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
    if where == "inside, mesh set":
        with jax.set_mesh(mesh):
            found = called(*placed)
    else:
        found = called(*placed)
    for got, want in zip(jax.tree.leaves(found), wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, atol=1e-5)
    if name in ("project_tree", "init_tree") and (mesh_name, where) == ("explicit", "inside"):
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, placed[0])


@eight_devices
@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_tree_checks_accept_sharded_parameters(mesh):
    placed = mixed(0, jax.make_mesh(*MESHES[mesh]))
    assert optim.resolve_geometry(PLACED, placed)["stack"] == Hypersphere()
    assert str(optim.tabulate(PLACED, placed)) == str(optim.tabulate(PLACED, mixed(0)))
    optim.check_chain(optim.riemannian_sgd(0.01, PLACED), PLACED, placed)
