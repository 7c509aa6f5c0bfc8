"""Accepted arguments, and errors for updates that do not match the parameters.

tests/test_refusals.py tests the arguments that constructors reject.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, Layout, Stiefel
from manifoldmuon.modules import Linear
from manifoldmuon.norms import RMSToRMS

FLAT = Euclidean(RMSToRMS())
PARAMS = {"w": jnp.eye(4, 3)}

OPTIMIZERS = {
    "manifold_muon": optim.manifold_muon(0.1, Stiefel()),
    "muon": optim.muon(0.1, FLAT, clip=1.0),
    "normuon": contrib.normuon(0.1, FLAT),
    "modular": optim.modular(0.1, Linear(4, 3)),
    "normed": optim.normed(0.1, optax.scale_by_adam(), Linear(4, 3)),
    "riemannian_adam": optim.riemannian_adam(0.1, Stiefel()),
    "riemannian_sgd": optim.riemannian_sgd(0.1, Stiefel(), 0.9),
    "agd": optim.agd(Layout()),
    "with_master_copies": optim.with_master_copies(optim.muon(0.1, FLAT)),
}


# Their parameters are one array.
SINGLE = OPTIMIZERS["modular"], OPTIMIZERS["normed"]


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_updates_that_do_not_match_raise(tx):
    """Otherwise momentum would broadcast them."""
    params = PARAMS["w"] if tx in SINGLE else PARAMS
    state = tx.init(params)
    short = jax.tree.map(lambda x: jnp.ones((1, *x.shape[1:])), params)
    for updates, message in (
        (short, r"has shape \(1, 3\), the parameter \(4, 3\)"),
        ({"v": jnp.ones((4, 3))}, "updates and parameters are different trees"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            tx.update(updates, state, params)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["manifold_muon", "muon", "modular"])
def test_exchanged_state_and_parameters_are_named(name):
    tx = OPTIMIZERS[name]
    params = PARAMS["w"] if tx in SINGLE else PARAMS
    with pytest.raises(ValueError, match=r"update\(updates, state, params\): were two exchanged"):
        tx.update(params, params, tx.init(params))  # type: ignore[arg-type]


NUMBERS = [0.5, np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)]  # others: test_refusals.py


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__} {x}")
def test_all_number_types_are_accepted(number):
    tx = optim.manifold_muon(number, FLAT, number, clip=number, weight_decay=number)
    updates: Any = tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]
    # A step of norm `number` plus weight decay `number`, both along W.
    expected = -float(number) * (np.sqrt(4 / 3) + float(number)) * np.eye(4, 3)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-2, atol=1e-3)


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
