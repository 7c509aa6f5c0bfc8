"""Inside `jax.shard_map`, with its check of varying mesh axes (`check_vma`)."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.contrib import quantized
from manifoldmuon.linalg import msign
from manifoldmuon.manifolds import Hypersphere, Manifold, SpectralBall, SpectralSphere, Stiefel
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.modules import Linear
from manifoldmuon.norms import Spectral
from manifoldmuon.testing import check_inside_shard_map
from tests.compiled import ask
from tests.linalg.instances import METHODS, MethodCase


@pytest.mark.slow
@pytest.mark.parametrize(
    "manifold",
    [SpectralSphere(), SpectralBall(), Stiefel()],
    ids=lambda manifold: type(manifold).__name__,
)
def test_derivatives_inside_shard_map(manifold: Manifold):
    x = jnp.ones((3, 3))

    def loss(point, grad):
        direction = manifold.steepest(point, grad, manifold.init_dual(x.shape)).direction
        moved = manifold.retract(point, direction)
        return sum(jnp.sum(y) for y in (direction, moved, manifold.project(point)))

    check_inside_shard_map(jax.grad(loss, (0, 1)), x, x)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_iterative_solvers_inside_shard_map(tolerance):
    x, solver = jnp.ones((6, 3)), DualAscent(tolerance=tolerance)
    solve = functools.partial(solver.solve, Spectral())
    check_inside_shard_map(solve, x, x, solver.init(x.shape))


@pytest.mark.parametrize("method", METHODS, ids=lambda case: case.name)
def test_polar_factors_inside_shard_map(method: MethodCase):
    loss = jax.value_and_grad(lambda x: jnp.sum(msign(x, method.method)))
    check_inside_shard_map(loss, jnp.ones((6, 3)))


def test_stacked_modules_inside_shard_map():
    stack = Linear(4, 4) ** 3
    params = jax.tree.map(jnp.ones_like, jax.eval_shape(stack.init, jax.random.key(0)))
    slope = jax.grad(lambda params, x: jnp.sum(stack.apply(params, x)), (0, 1))
    check_inside_shard_map(slope, params, jnp.ones((5, 4)))


def test_init_tree_inside_shard_map():
    geometry, like = {"a": Stiefel()}, {"a": jnp.ones((6, 3))}
    draw = lambda seed: optim.init_tree(geometry, jax.random.key(seed), like)  # noqa: E731
    check_inside_shard_map(draw, jnp.uint32(0))


@pytest.mark.slow
def test_steps_inside_shard_map_match_single_device():
    geometry = {"sphere": SpectralSphere(), "fixed": Hypersphere(ndim=2, step_norm=Spectral())}
    geometry |= dict.fromkeys("abc", Stiefel())  # equal leaves are solved together
    geometry = {name: manifold.stacked() for name, manifold in geometry.items()}
    tx = optim.manifold_muon(0.1, geometry)
    rng = np.random.default_rng(0)
    # A matrix per device; the initial state is the same on both.
    params, grads = (
        {name: np.float32(rng.standard_normal((2, 6, 3))) for name in geometry} for _ in range(2)
    )
    params = ask(lambda params: optim.project_tree(geometry, params), params)

    def steps(params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return params

    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    each = PartitionSpec("devices")
    divided = jax.shard_map(steps, mesh=mesh, in_specs=(each, each), out_specs=each)
    found = ask(divided, params, grads)
    for device in range(2):
        part = lambda x, device=device: x[device : device + 1]  # noqa: E731
        alone = ask(steps, *jax.tree.map(part, (params, grads)))
        chex.assert_trees_all_close(jax.tree.map(part, found), alone, rtol=1e-6, atol=1e-7)


def test_pipeline_stages_of_explicit_mesh_match_single_device():
    """Stages are manual inside `jax.shard_map`, the other axis stays explicit."""
    tx = optim.chain(quantized(optax.trace(0.9), min_size=0), optim.descend(0.1, Stiefel()))
    tx = optim.start_anywhere(tx)  # JAX has no callbacks there
    rng = np.random.default_rng(6)
    params, grads = rng.standard_normal((2, 2, 8, 4)).astype(np.float32)
    params = np.linalg.qr(params)[0]

    def step(params: jax.Array, grads: jax.Array) -> jax.Array:
        updates: Any = tx.update(grads[0], tx.init(params[0]), params[0])[0]
        return updates[None]

    mesh = jax.make_mesh((2, 1), ("stages", "model"), 2 * (AxisType.Explicit,))
    each = PartitionSpec("stages")
    stages = jax.shard_map(
        step, mesh=mesh, in_specs=(each, each), out_specs=each, axis_names={"stages"}
    )
    placed = NamedSharding(mesh, PartitionSpec("stages", "model", None))
    with jax.set_mesh(mesh):
        found = jax.jit(stages)(*jax.device_put((params, grads), placed))
    assert found.sharding == placed
    alone = [ask(step, params[i : i + 1], grads[i : i + 1]) for i in range(2)]
    np.testing.assert_allclose(found, np.concatenate(alone), rtol=1e-6, atol=1e-7)
