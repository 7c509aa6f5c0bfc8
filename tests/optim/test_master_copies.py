"""bfloat16 parameters with float32 master copies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.norms import MaxAbs
from tests.optim.training import train


def walk(tx: Any, params: Any, steps: int) -> tuple[Any, Any]:
    return train(tx, params, [jax.tree.map(jnp.ones_like, params)] * steps)


def test_small_steps_accumulate_in_copies():
    params = {"w": jnp.full((3,), 2.0, jnp.bfloat16)}
    descent = optim.manifold_muon(1e-3, Euclidean(MaxAbs(ndim=1)), momentum=None)
    lost, _ = walk(descent, params, 100)
    np.testing.assert_array_equal(lost["w"], 2)  # a step is a fifteenth of the spacing at 2
    kept, state = walk(optim.with_master_copies(descent), params, 100)
    np.testing.assert_allclose(state.copies["w"], 1.9, rtol=1e-5)
    np.testing.assert_array_equal(kept["w"], state.copies["w"].astype(jnp.bfloat16))
    assert kept["w"].dtype == jnp.bfloat16


def test_copies_match_float32_run():
    """Bit for bit, if gradients do not depend on the parameters."""
    params = {"a": jnp.linspace(-1, 1, 12).reshape(4, 3).astype(jnp.bfloat16), "hole": None}
    adam = optax.adamw(3e-2)
    params_after, state = walk(optim.with_master_copies(adam), params, 5)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    wide_after, _ = walk(adam, wide, 5)
    np.testing.assert_array_equal(state.copies["a"], wide_after["a"])
    miss = np.abs(np.float32(params_after["a"]) - np.float32(wide_after["a"]))
    assert miss.max() <= 2.0**-8


def test_float64_copies_stay_float64():
    with jax.enable_x64(True):
        params = {"w": jnp.asarray([1.0, 2.0**-40])}
        state: Any = optim.with_master_copies(optax.sgd(0.1)).init(params)
        assert state.copies["w"].dtype == jnp.float64
        np.testing.assert_array_equal(state.copies["w"], params["w"])
