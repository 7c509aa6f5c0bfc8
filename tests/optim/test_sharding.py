"""Sharded parameters on eight devices, on meshes whose axes are automatic or explicit."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ADMM
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.testing import check_sharding
from tests.optim.instances import Instance

MESHES = {
    "automatic": ((8,), ("x",), (AxisType.Auto,)),
    "explicit": ((8,), ("x",), (AxisType.Explicit,)),
    "both": ((4, 2), ("x", "y"), (AxisType.Explicit, AxisType.Auto)),
}
# Three leaves of one kind do not divide among eight devices, nor does the axis of length 5.
SHAPES = {"m": {"1": (16, 8), "2": (16, 8), "3": (16, 8)}, "stack": (8, 5), "bias": (5,)}
LAYOUT = {
    "m": {"1": ("x", None), "2": ("x", None), "3": (None, "x")},
    "stack": ("x", None),
    "bias": (None,),
}
# A solver with a warm start, so that there are dual variables in the state.
GEOMETRY = {"m": Stiefel(solver=ADMM(steps=2)), "stack": Hypersphere(), "bias": Euclidean()}


def shardings(mesh: jax.sharding.Mesh) -> dict:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, PartitionSpec(*spec)),
        LAYOUT,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_parameters_take_the_same_steps(mesh):
    mesh = jax.make_mesh(*MESHES[mesh])
    instance = Instance(
        optim.manifold_muon,
        GEOMETRY,
        SHAPES,
        {"learning_rate": 0.1, "weight_decay": 0.1, "budgets": 0.5},
    )
    check_sharding(instance.tx(), instance.params(), instance.grads(), shardings(mesh))


def test_tangent_parts_of_sharded_parameters():
    instance = Instance(
        optim.riemannian_sgd, GEOMETRY, SHAPES, {"learning_rate": 0.1, "momentum": 0.9}
    )
    placed = shardings(jax.make_mesh(*MESHES["explicit"]))
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_blocks_and_neurons_where_their_array_is_sharded(mesh):
    """An axis that is cut into two blocks is divided among eight devices."""
    muon = Euclidean(RMSToRMS())
    geometry = {"fused": LaidOut(muon, Layout(out_blocks=2)), "kernel": muon.transposed()}
    instance = Instance(optim.scale_by_neuron_rms, geometry, {"fused": (16, 8), "kernel": (8, 5)})
    spec = NamedSharding(jax.make_mesh(*MESHES[mesh]), PartitionSpec("x", None))
    placed = jax.tree.map(lambda _: spec, instance.params())
    check_sharding(instance.tx(), instance.params(), instance.grads(), placed)


def test_trees_on_an_explicit_mesh():
    mesh = jax.make_mesh(*MESHES["explicit"])
    instance = Instance(optim.retract, GEOMETRY, SHAPES)
    params = instance.params()
    doubled = jax.tree.map(lambda x: 2 * x, params)

    @jax.jit
    def tour(doubled):
        projected = optim.project_tree(GEOMETRY, doubled)
        drawn = optim.init_tree(GEOMETRY, jax.random.key(3), doubled)
        return projected, drawn, optim.distance_tree(GEOMETRY, doubled)

    found = tour(jax.device_put(doubled, shardings(mesh)))
    for wanted, got in zip(jax.tree.leaves(tour(doubled)), jax.tree.leaves(found), strict=True):
        assert jnp.allclose(jax.device_get(got), wanted, atol=1e-5)
    for got in found[:2]:
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(
            jax.typeof, jax.device_put(doubled, shardings(mesh))
        )


@pytest.mark.parametrize("mesh", ["automatic", "explicit"])
def test_weights_are_drawn_where_they_are_to_lie(mesh):
    """After abstract arrays with shardings, and inside jit after arrays that lie elsewhere."""
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
