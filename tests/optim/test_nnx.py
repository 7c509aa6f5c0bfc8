"""`nnx.Optimizer`: it initialises with boxed parameters and updates with unboxed arrays."""

from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon._internal.trees.paths import path_string
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from tests.optim.training import train

KERNEL = Stiefel(solver=ProjectedPolar()).transposed()
MATRICES: dict[Any, Any] = {"stack/kernel": KERNEL.stacked(), "**/kernel": KERNEL}
GEOMETRY = optim.by_path(MATRICES | {"**/bias": Euclidean()})
PATHS = {f"{layer}/{leaf}" for layer in ("first", "list/0", "stack") for leaf in ("kernel", "bias")}
KERNELS = {path for path in PATHS if path.endswith("kernel")}


class Net(nnx.Module):
    """Network with a layer, a layer in a list, and a stack of layers made by `nnx.vmap`."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.list = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, use_bias=False, use_scale=False, rngs=rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.stack = stacked(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(layer, x):
            return jnp.tanh(layer(x))

        return through(self.stack, self.norm(self.list[0](self.first(x))))


X = jax.random.normal(jax.random.key(0), (8, 4))


def loss(model):
    return jnp.mean((model(X) - 1) ** 2)


def labels(params: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, _: "muon" if "kernel" in path_string(path) else "adam", params
    )


MUON = optim.manifold_muon(0.1, GEOMETRY, weight_decay=0.1)
REST = optim.by_path(MATRICES | {"**/bias": None})
PARTS = optax.partition({"muon": MUON, "adam": optax.adam(0.01)}, labels)
EVERY_TX = {
    "manifold_muon": MUON,
    "rest": optim.manifold_muon(0.1, REST, rest=optax.adamw(0.01)),
    "wrapped": optax.MultiSteps(PARTS, every_k_schedule=2).gradient_transformation(),
}


@pytest.mark.slow_except("rest")
@pytest.mark.parametrize("name", EVERY_TX)
def test_nnx_optimizer_matches_optax_loop(name):
    """The loop gets the same gradients as nested dictionaries."""
    tx: Any = EVERY_TX[name]
    model = Net(nnx.Rngs(0))
    nnx.update(model, optim.project_tree(GEOMETRY, nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = plain(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        return grads

    batches = [plain(step(model, optimizer)) for _ in range(4)]
    params, state = train(tx, params, batches)
    found = nnx.state(model, nnx.Param)
    chex.assert_trees_all_close(plain(found), params, atol=2e-5)
    report = optim.monitor(optimizer.opt_state)
    assert set(report["gap"]) == (PATHS if name == "manifold_muon" else KERNELS)
    wanted = optim.monitor(jax.tree.map(jnp.asarray, state))
    chex.assert_trees_all_close(report, wanted, atol=1e-3)


def test_radii_are_found_in_boxed_states():
    model = Net(nnx.Rngs(0))
    sphere = Hypersphere(ndim=2)
    spheres = optim.by_path({"stack/kernel": sphere.stacked(), "**/kernel": sphere, "**": None})
    tx = optim.muonh(0.1, spheres, rest=optax.adamw(0.01))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = plain(nnx.state(model, nnx.Param))
    model.stack.kernel[...] *= jnp.array([1.0, 1.5])[:, None, None]  # only the second layer
    found = optim.monitor_distance(spheres, nnx.state(model, nnx.Param), optimizer.opt_state)
    assert found.keys() == KERNELS
    wanted = {path: 0.5 * (path == "stack/kernel") for path in KERNELS}
    chex.assert_trees_all_close(found, wanted, atol=1e-6)
    nnx.jit(lambda m, o: o.update(m, nnx.grad(loss)(m)))(model, optimizer)
    kernels = model.stack.kernel[...], before["stack"]["kernel"]
    norms = [jnp.linalg.norm(x, axis=(-2, -1)) for x in kernels]
    chex.assert_trees_all_close(*norms, rtol=1e-6)
    scalars = optim.monitor_scalars(optimizer.opt_state, spheres, nnx.state(model, nnx.Param))
    assert scalars.keys() == {f"distance/{path}" for path in KERNELS}
    assert max(scalars.values()) < 1e-6


def plain(state: Any) -> Any:
    return jax.tree.map(jnp.copy, nnx.to_pure_dict(state))


def test_boxes_are_not_in_paths():
    variables = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    assert set(optim.monitor_distance(GEOMETRY, variables)) == PATHS
    # The geometry may be boxed too.
    geometry = optim.resolve_geometry(GEOMETRY, variables)
    for params in (variables, nnx.to_pure_dict(variables)):
        assert set(optim.monitor_distance(geometry, params)) == PATHS
    shapes = jax.eval_shape(lambda: plain(variables))
    boxed, bare = (optim.init_tree(GEOMETRY, jax.random.key(0), t) for t in (variables, shapes))
    chex.assert_trees_all_equal(nnx.to_pure_dict(boxed), bare)


def test_linen_partitioned_parameters_are_unboxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
    variables = nn.Dense(4, kernel_init=init).init(jax.random.key(0), X)
    geometry = optim.by_path({"**/kernel": KERNEL, "**/bias": Euclidean()})
    assert optim.resolve_geometry(geometry, variables)["params"]["kernel"].value == KERNEL
    assert set(optim.monitor_distance(geometry, variables)) == {"params/kernel", "params/bias"}


class Heads(eqx.Module):
    query: Any
    value: Any


def test_field_named_value_is_not_a_box():
    w = jnp.ones((3, 2))
    for tree in (Heads(w, w), Heads(None, w), Heads(optax.MaskedNode(), w)):
        paths = set(optim.monitor_distance(Euclidean(), {"heads": tree}))
        assert paths == ({"heads/query"} if tree.query is w else set()) | {"heads/value"}
