"""Fine-tuning: adapters start at the base weights, merge up to rounding, and learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from studies.fine_tuning import METHODS, RIVAL, FineTuning, adapted

pytestmark = pytest.mark.slow

ADAPTERS = [name for name in METHODS if "Muon" not in name and "all" not in name]
BASE = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_start_at_base_weights(name, dtype):
    base = BASE.astype(dtype)
    factors = METHODS[name].init(jax.random.key(0), base, 2)
    np.testing.assert_array_equal(adapted(base, factors).astype(dtype), base)


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_factors_move_at_first_step(name, dtype):
    """At the first step only factors with a gradient move; at the second, all factors do."""
    method = METHODS[name]
    factors = jax.tree.map(lambda x: x.astype(dtype), method.init(jax.random.key(0), BASE, 2))
    tx = method.optimizer(lambda _: 0.1, 1)
    grad = jax.grad(lambda f: jnp.sum(jnp.sin(adapted(BASE, f[0]) + 1.0)))
    params: Any = [factors]
    state = tx.init(params)
    first = grad(params)
    updates: Any
    updates, state = tx.update(first, state, params)
    for key, own in first[0].items():
        moved = float(jnp.abs(updates[0][key].astype(jnp.float32)).max())
        assert (moved > 0) == bool(jnp.any(own != 0))
        assert np.isfinite(moved)
    params = optax.apply_updates(params, updates)
    updates, state = tx.update(grad(params), state, params)
    assert all(float(jnp.abs(u.astype(jnp.float32)).max()) > 0 for u in updates[0].values())


@pytest.mark.parametrize("name", METHODS)
def test_merged_weights_match_adapter(name):
    """The expected output passes the input through the factors, without merging."""
    rng = np.random.default_rng(1)
    factors = METHODS[name].init(jax.random.key(0), BASE, 2)
    factors = {k: jnp.float32(v + 0.1 * rng.normal(size=v.shape)) for k, v in factors.items()}
    x = rng.normal(size=6).astype(np.float32)
    f = {k: np.asarray(v, np.float64) for k, v in factors.items()}
    if "q" in f:
        turned = f["q"] @ x.reshape(len(f["q"]), -1, 1)
        expected = np.asarray(BASE, np.float64) @ turned.ravel()
    elif "s" in f:
        expected = BASE @ x + f["u"] @ (f["s"] @ (f["v"].T @ x))
    elif "w" in f:
        expected = f["w"] @ x
    else:
        expected = BASE @ x + f["b"] @ (f["a"] @ x)
    np.testing.assert_allclose(adapted(BASE, factors) @ x, expected, rtol=1e-5, atol=1e-5)


def test_study_recovers_target():
    study = FineTuning(tasks=("target",), methods=(RIVAL, "StelLA"), seeds=(0, 1))
    rows = [{**cell, **study.run(cell)} for cell in study.cells()]
    assert all(row["jump"] == 0 for row in rows)
    found = study.summarise(rows)["target"]
    assert found["StelLA"]["mean"] < -3
