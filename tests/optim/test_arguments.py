"""Accepted arguments, and errors for updates that do not match the parameters.

tests/test_refusals.py tests the arguments that constructors reject.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.norms import RMSToRMS
from tests.optim.test_state_paths import TRANSFORMATIONS

FLAT = Euclidean(RMSToRMS())
PARAMS = {"w": jnp.eye(4, 3)}
WITH_MOMENTUM = [
    "manifold_muon",
    "muon",
    "normuon",
    "modular",
    "normed",
    "riemannian_adam",
    "riemannian_sgd",
    "agd",
    "with_master_copies",
]


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_updates_that_do_not_match_raise(name):
    """Otherwise momentum would broadcast them."""
    tx = TRANSFORMATIONS[name]
    state = tx.init(PARAMS)
    for updates, message in (
        ({"w": jnp.ones((1, 3))}, r"has shape \(1, 3\), the parameter \(4, 3\)"),
        ({"v": jnp.ones((4, 3))}, "updates and parameters are different trees"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            tx.update(updates, state, PARAMS)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["manifold_muon", "muon", "modular"])
def test_exchanged_state_and_parameters_are_named(name):
    tx = TRANSFORMATIONS[name]
    with pytest.raises(ValueError, match=r"update\(updates, state, params\): were two exchanged"):
        tx.update(PARAMS, PARAMS, tx.init(PARAMS))  # type: ignore[arg-type]


NUMBERS = [0.5, np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)]  # others: test_refusals.py


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__} {x}")
def test_all_number_types_are_accepted(number):
    tx = optim.manifold_muon(number, FLAT, number, clip=number, weight_decay=number)
    updates: Any = tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]
    # A step of norm `number` plus weight decay `number`, both along W.
    expected = -float(number) * (np.sqrt(4 / 3) + float(number)) * np.eye(4, 3)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-2, atol=1e-3)


def test_longer_arrays_are_not_called_static():
    with pytest.raises(ValueError, match=r"or a schedule; got Array\(\[1\.\], dtype=float32\)$"):
        optim.muon(jnp.ones(1), FLAT)


def test_schedules_and_clip_transformations_are_accepted():
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    optim.muon(schedule, FLAT, weight_decay=schedule, clip=optax.clip(1.0)).init(PARAMS)


def test_traced_numbers_are_accepted():
    """Traced values are unknown, so only shapes and dtypes are checked."""

    @jax.jit
    def step(rate, momentum):
        tx = optim.muon(rate, FLAT, momentum)
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]

    step(0.1, 0.9)
    with pytest.raises(ValueError, match=r"learning_rate must be a finite number in \[0"):
        step(jnp.ones(2), 0.9)
    with pytest.raises(ValueError, match=r"momentum must be a finite number in \[0, 1\)"):
        step(0.1, True)
