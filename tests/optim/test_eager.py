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
from tests.optim.instances import WITH_OPTAX_MUON
from tests.optim.training import drawn

SPHERE = Hypersphere(ndim=2)


@pytest.mark.slow_except("manifold_muon", "muonh")
@pytest.mark.parametrize("name", WITH_OPTAX_MUON)
def test_later_eager_updates_compile_nothing(name):
    """JAX compiles a loop or conditional outside of `jax.jit` in every call.

    With an extra argument, which wrappers such as `optax.contrib.reduce_on_plateau` pass to all.
    """
    instance, value = WITH_OPTAX_MUON[name], jnp.ones(())
    tx, params, grads = instance.tx(), instance.params(), [instance.grads(i) for i in range(3)]
    state = tx.init(params)
    for grad in grads[:2]:
        _, state = tx.update(grad, state, params, value=value)
    before = len(COMPILATIONS)
    updates, _ = tx.update(grads[2], state, params, value=value)
    assert len(COMPILATIONS) == before
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


@pytest.mark.slow_except("adamh")
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


@pytest.mark.slow_except("adamh")
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


FLAT = Euclidean(RMSToRMS())
OPTIMIZERS: dict[str, Any] = {
    "muon": optim.muon(0.1, FLAT),
    "manifold_muon": optim.manifold_muon(0.1, Stiefel()),
    "muonh": optim.muonh(0.1, SPHERE),
    "adamh": optim.adamh(0.1, SPHERE),
    "riemannian_adam": optim.riemannian_adam(0.1, Stiefel()),
    "normalize": optim.normalize(optax.scale_by_adam(), FLAT),
    "optax_muon": optim.optax_muon(0.1),
}


@pytest.mark.slow_except("x-Explicit-muonh")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()], ids=["x", "None, x", "whole"])
def test_eager_updates_keep_the_sharding_of_equal_weights(name, kind, spec):
    mesh = jax.make_mesh((2,), ("x",), (getattr(AxisType, kind),))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    alone = optim.project_tree(Stiefel(), drawn(1, {"a": (6, 4), "b": (6, 4)}))
    params, tx = jax.device_put(alone, sharding), OPTIMIZERS[name]
    expected, found = (tx.update(x, tx.init(x), x)[0] for x in (alone, params))
    for key, x in found.items():
        assert x.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_allclose(x, expected[key], atol=1e-5)
