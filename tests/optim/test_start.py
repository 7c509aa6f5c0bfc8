"""`start_on`: the first update moves weights to their manifolds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Stiefel
from tests.optim.training import drawn, train

SHAPES = {"a": (3, 8, 4), "rows": (6, 4), "sphere": (5,), "free": (4,), "rest": (3,)}
GEOMETRY = {
    "a": Stiefel(2.0).stacked(),
    "rows": EmbeddingRows().transposed(),
    "sphere": Hypersphere(),
    "free": Euclidean(),
    "rest": None,
}
ADAM = optax.adam(0.01)
INNER = {
    "manifold_muon": optim.manifold_muon(0.1, GEOMETRY, rest=optax.adamw(0.01), clip=1.0),
    "riemannian_adam": optim.hybrid(optim.riemannian_adam(0.1, GEOMETRY), GEOMETRY, ADAM),
    "master copies": optim.with_master_copies(optim.manifold_muon(0.1, GEOMETRY, rest=ADAM)),
}
FAR = drawn(0, SHAPES)
GRADS = [drawn(seed, SHAPES) for seed in (1, 2, 3)]


@pytest.mark.slow_except("manifold_muon")
@pytest.mark.parametrize("name", INNER)
def test_first_update_is_projection_and_step_from_there(name):
    """Against `project_tree` before training, with the same gradients."""
    tx = INNER[name]
    near = jax.jit(lambda params: optim.project_tree(GEOMETRY, params))(FAR)
    params, state = train(optim.start_on(tx, GEOMETRY), FAR, GRADS)
    wanted, inner = train(tx, near, GRADS)
    for path in SHAPES:
        np.testing.assert_allclose(params[path], wanted[path], atol=2e-6, err_msg=path)
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner)


@pytest.mark.slow
def test_later_updates_equal_those_of_the_optimizer():
    tx = INNER["manifold_muon"]
    wrapped = optim.start_on(tx, GEOMETRY)
    params, state = train(wrapped, FAR, GRADS[:1])
    again, _ = jax.jit(wrapped.update)(GRADS[1], state, params)
    alone, _ = jax.jit(tx.update)(GRADS[1], state.inner, params)
    jax.tree.map(np.testing.assert_array_equal, again, alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_dtypes_reach_their_points_from_far_away(dtype):
    geometry = {"w": Stiefel(), "s": Hypersphere()}
    far = {"w": 30 * drawn(4, (8, 4)), "s": 100 * drawn(5, (9,))}
    far = jax.tree.map(lambda x: jnp.asarray(x, dtype), far)
    tx = optim.start_on(optim.manifold_muon(0.05, geometry), geometry)
    params, _ = train(tx, far, [jax.tree.map(jnp.cos, far)] * 2)
    for distance in optim.monitor_distance(geometry, params).values():
        assert distance < 4 * float(jnp.finfo(dtype).eps)


def test_zero_learning_rate_moves_weights_alone():
    warm_up = optax.linear_schedule(0.0, 0.1, 10)
    tx = optim.start_on(optim.manifold_muon(warm_up, Stiefel()), Stiefel())
    params, _ = train(tx, 3 * jnp.eye(4, 3), [jnp.ones((4, 3))])
    np.testing.assert_allclose(params, np.eye(4, 3), atol=1e-6)


@pytest.mark.slow
def test_wrappers_of_optax_keep_the_first_move():
    tx = optim.start_on(optim.manifold_muon(0.1, Stiefel()), Stiefel())
    far, grad = 3 * jnp.eye(4, 3), jnp.ones((4, 3))
    wanted, _ = train(tx, far, [grad])
    twice, _ = train(optax.MultiSteps(tx, 2), far, [grad, grad])
    np.testing.assert_allclose(twice, wanted, atol=1e-6)
    skipped, _ = train(optax.apply_if_finite(tx, 3), far, [jnp.nan * grad, grad])
    np.testing.assert_allclose(skipped, wanted, atol=1e-6)


@pytest.mark.slow_except("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_start_keeps_shardings(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    far = jax.device_put(drawn(6, (8, 16, 8)), NamedSharding(mesh, PartitionSpec("x")))
    geometry = Stiefel().stacked()
    tx = optim.start_on(optim.riemannian_sgd(0.1, geometry), geometry)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(far)
        updates, _ = jax.jit(tx.update)(jnp.cos(far), state, far)
    assert updates.sharding.is_equivalent_to(far.sharding, 3)
    assert optim.monitor_distance(geometry, jax.device_get(far + updates))[""] < 1e-5


@pytest.mark.slow
def test_chain_and_check_chain_accept_start():
    tx = optim.start_on(INNER["manifold_muon"], GEOMETRY)
    optim.check_chain(optim.chain(optax.zero_nans(), tx), GEOMETRY, FAR)
    with pytest.raises(ValueError, match="must be last"):
        optim.chain(tx, optax.scale(0.5))
