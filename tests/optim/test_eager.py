"""Updates outside of `jax.jit`, as in a notebook."""

import jax
import pytest

from tests.compiled import COMPILATIONS
from tests.optim.instances import INSTANCES


@pytest.mark.slow_except("manifold_muon")
@pytest.mark.parametrize("name", INSTANCES)
def test_later_eager_updates_compile_nothing(name):
    """JAX compiles a loop or conditional outside of `jax.jit` in every call."""
    instance = INSTANCES[name]
    tx, params = instance.tx(), instance.params()
    state = tx.init(params)
    for seed in range(2):
        _, state = tx.update(instance.grads(seed), state, params)
    grads, before = instance.grads(2), len(COMPILATIONS)
    updates, _ = tx.update(grads, state, params)
    assert len(COMPILATIONS) == before
    assert jax.tree.structure(updates) == jax.tree.structure(params)
