"""bfloat16 parameters with float32 master copies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Hypersphere, Stiefel
from tests.compiled import ask
from tests.optim.training import train


def test_copies_match_float32_run():
    """Bit for bit, if gradients do not depend on the parameters: small steps accumulate."""
    params = {"a": jnp.linspace(-1, 1, 12).reshape(4, 3).astype(jnp.bfloat16), "hole": None}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    adam, grads = optax.adamw(1e-3), [jax.tree.map(jnp.ones_like, wide)] * 5
    short, state = train(optim.with_master_copies(adam), params, grads)
    wanted, _ = train(adam, wide, grads)
    np.testing.assert_array_equal(state.copies["a"], wanted["a"])
    np.testing.assert_array_equal(short["a"], wanted["a"].astype(jnp.bfloat16))


def test_float64_copies_stay_float64():
    with jax.enable_x64(True):
        params = {"w": jnp.asarray([1.0, 2.0**-40])}
        state: Any = optim.with_master_copies(optax.sgd(0.1)).init(params)
        assert state.copies["w"].dtype == jnp.float64
        np.testing.assert_array_equal(state.copies["w"], params["w"])


def test_master_copies_leave_integers_alone():
    params = {"w": jnp.eye(4, dtype=jnp.bfloat16), "count": jnp.arange(3), "gain": 0.5}
    geometry = {"w": Stiefel(), "count": None, "gain": None}
    rest = optax.set_to_zero()
    tx = optim.with_master_copies(optim.manifold_muon(0.1, geometry, rest=rest))
    grads = {"w": jnp.eye(4, k=1, dtype=jnp.bfloat16), "count": 0 * params["count"], "gain": 1.0}
    updates: Any = tx.update(grads, tx.init(params), params)[0]
    assert updates["w"].any()
    assert updates["count"].dtype == jnp.int32
    assert not updates["count"].any()
    assert updates["gain"] == 0
    with pytest.raises(ValueError, match=r"needs params: call tx.update\(grads, state, params\)"):
        tx.update(grads, tx.init(params))


@pytest.mark.slow
def test_copies_in_float32_resolve_what_bfloat16_does_not():
    """With master copies the same gradient is no noise: a tangent share of a thousandth."""
    sphere, share = Hypersphere(), 1e-3
    point = jnp.array([1.0, 0.0], jnp.bfloat16)
    grad = jnp.array([3.0, 3 * share], jnp.bfloat16)
    tx = optim.manifold_muon(0.1, sphere)
    short, _ = ask(lambda g, w: tx.update(g, tx.init(w), w), grad, point)
    copies = optim.with_master_copies(tx)
    moved, state = ask(lambda g, w: copies.update(g, copies.init(w), w), grad, point)
    assert not short.any()
    assert moved[1] == jnp.bfloat16(state.copies[1]) != 0
    np.testing.assert_allclose(state.copies[1], -np.sin(np.arctan(0.1)), rtol=1e-4)
