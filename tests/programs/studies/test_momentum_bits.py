"""Momentum in few bits: transformations of the study, and its table."""

import jax.numpy as jnp
import optax
import pytest

from studies.momentum_bits import FULL, MOMENTA, MomentumBits


@pytest.mark.parametrize(("kept", "dtype"), [
    (FULL, "float32"), ("bfloat16", "bfloat16"), ("8 bits", "int8"), ("4 bits", "int4"),
])  # fmt: skip
def test_momentum_has_named_dtype(kept, dtype):
    state = MOMENTA[kept](0.9, nesterov=True).init({"q": jnp.ones((2, 64, 64))})
    assert str(optax.tree.get(state, "trace")["q"].dtype) == dtype


@pytest.mark.slow
def test_short_training_runs_with_4_bits():
    study = MomentumBits(steps=3, batch=2, context=8, held_out=32)
    kept = (FULL, "4 bits")
    rows = [study.run({"method": "Muon", "momentum_in": name, "seed": 0}) for name in kept]
    first, second = (row["loss"] for row in rows)
    assert first != second
    assert abs(first - second) < 0.05
