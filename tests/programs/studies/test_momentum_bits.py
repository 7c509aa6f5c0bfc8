"""Momentum in few bits: transformations of the study, and its table."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from studies import MomentumBits
from studies.momentum_bits import FULL, MOMENTA


@pytest.mark.parametrize(("kept", "dtype"), [
    (FULL, "float32"), ("bfloat16", "bfloat16"), ("8 bits", "int8"), ("4 bits", "int4"),
])  # fmt: skip
def test_momentum_has_named_dtype(kept, dtype):
    state = MOMENTA[kept](0.9, nesterov=True).init({"q": jnp.ones((2, 64, 64))})
    assert str(optax.tree.get(state, "trace")["q"].dtype) == dtype


def test_differences_are_paired_by_seed():
    study = MomentumBits(methods=("Muon",), momenta=(FULL, "8 bits"), seeds=(0, 1, 2))
    losses = {FULL: (1.0, 2.0, 3.0), "8 bits": (1.1, 2.3, 3.2)}
    rows = [
        {**cell, "loss": losses[cell["momentum_in"]][cell["seed"]], "train_loss": 1.0}
        for cell in study.cells()
    ]
    found = study.summarise(rows)["Muon"]["8 bits"]
    assert found["beyond"]["mean"] == pytest.approx(0.2)
    # Student's quantile with two degrees of freedom is 4.303; the deviation is 0.1.
    low, high = found["beyond"]["interval"]
    assert (high - low) / 2 == pytest.approx(4.303 * 0.1 / np.sqrt(3), rel=1e-3)
    assert found["train_beyond"]["interval"] == (0, 0)
    table = study.table({"summary": study.summarise(rows)})
    assert "+0.2000 ± 0.2484" in table


@pytest.mark.slow
def test_short_training_runs_with_4_bits():
    study = MomentumBits(steps=3, batch=2, context=8, held_out=32)
    kept = (FULL, "4 bits")
    rows = [study.run({"method": "Muon", "momentum_in": name, "seed": 0}) for name in kept]
    first, second = (row["loss"] for row in rows)
    assert first != second
    assert abs(first - second) < 0.05
