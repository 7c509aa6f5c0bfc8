"""Updates outside of `jax.jit`, as in a notebook."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS
from tests.compiled import COMPILATIONS
from tests.optim.instances import INSTANCES

SPHERE = Hypersphere(ndim=2)


@pytest.mark.slow_except("manifold_muon", "muonh")
@pytest.mark.parametrize("name", INSTANCES)
def test_later_eager_updates_compile_nothing(name):
    """JAX compiles a loop or conditional outside of `jax.jit` in every call."""
    instance = INSTANCES[name]
    check_third_update(instance.tx(), instance.params(), [instance.grads(i) for i in range(3)])


def check_third_update(tx, params, grads):
    """Assert that the third of three updates compiles nothing."""
    state = tx.init(params)
    for grad in grads[:2]:
        _, state = tx.update(grad, state, params)
    before = len(COMPILATIONS)
    updates, _ = tx.update(grads[2], state, params)
    assert len(COMPILATIONS) == before
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_later_eager_updates_of_optax_muon_compile_nothing():
    params = {"a": jnp.eye(6, 4), "b": jnp.eye(6, 4), "c": jnp.ones(3)}
    check_third_update(optim.optax_muon(0.1), params, [params] * 3)


@pytest.mark.parametrize("name", INSTANCES)
def test_extra_arguments_are_accepted(name):
    """Wrappers such as `optax.contrib.reduce_on_plateau` pass a value to all transformations."""
    instance = INSTANCES[name]
    tx, params = instance.tx(), instance.params()

    def update(params, grads):
        return tx.update(grads, tx.init(params), params, value=jnp.ones(()))[0]

    found = jax.eval_shape(update, params, instance.grads())
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("make", [optim.muonh, optim.adamh])
def test_programs_die_with_their_transformation(make):
    """A search over rates makes hundreds of transformations, each with rules of its own."""
    point, share = jnp.eye(6, 4), jnp.asarray(0.5)
    held = weakref.ref(share)
    tx = make(0.1, SPHERE, radial=share)
    tx.update(point, tx.init(point), point)
    del tx, share
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("make", [optim.muonh, optim.adamh])
def test_rules_may_close_over_traced_values(make, rng):
    point, grad = (jnp.asarray(rng.normal(size=(6, 4)), jnp.float32) for _ in range(2))

    def entry(share):
        tx = make(0.1, SPHERE, radial=share)
        return tx.update(grad, tx.init(point), point)[0][0, 0]

    np.testing.assert_allclose(jax.grad(entry)(0.5), jax.jit(jax.grad(entry))(0.5), rtol=1e-4)
    shares = jnp.array([0.25, 0.5])
    with jax.checking_leaks():
        found = jax.vmap(entry)(shares)
    np.testing.assert_allclose(found, [entry(x) for x in shares], rtol=1e-5)


MAKERS = {
    "muon": lambda: optim.muon(0.1, Euclidean(RMSToRMS())),
    "manifold_muon": lambda: optim.manifold_muon(0.1, Stiefel()),
    "muonh": lambda: optim.muonh(0.1, SPHERE),
    "adamh": lambda: optim.adamh(0.1, SPHERE),
    "riemannian_adam": lambda: optim.riemannian_adam(0.1, Stiefel()),
    "normalize": lambda: optim.normalize(optax.scale_by_adam(), Euclidean(RMSToRMS())),
    "optax_muon": lambda: optim.optax_muon(0.1),
}


@pytest.mark.slow_except("x-Explicit-muonh", "x-Auto-muonh")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()], ids=["x", "None, x", "whole"])
def test_eager_updates_keep_the_sharding_of_equal_weights(name, kind, spec):
    mesh = jax.make_mesh((2,), ("x",), (getattr(AxisType, kind),))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    keys = jax.random.split(jax.random.key(1))
    alone = {
        name: Stiefel().random_point(key, (6, 4), jnp.float32)
        for name, key in zip("ab", keys, strict=True)
    }
    params, tx = jax.device_put(alone, sharding), MAKERS[name]()
    expected: Any = tx.update(alone, tx.init(alone), alone)[0]
    found: Any = tx.update(params, tx.init(params), params)[0]
    for key, x in found.items():
        assert x.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_allclose(x, expected[key], atol=1e-5)
