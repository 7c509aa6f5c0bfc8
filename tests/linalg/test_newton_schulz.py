"""Newton-Schulz: its effect on singular values, its two forms, and operation counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import linalg
from tests.linalg.instances import conditioned
from tests.oracles.passes import multiplications

SCHEDULES = {
    "cubic": linalg.CUBIC.with_steps(12),
    "quintic": linalg.QUINTIC,
    "muon": linalg.MUON,
    "six steps": linalg.MODULA_SIX_STEP,
    "polar express": linalg.POLAR_EXPRESS,
    "degree 7": linalg.PolarExpress(1e-2, 7, cushion=0.05),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_singular_values_follow_the_schedule(schedule):
    x = conditioned((12, 5), 30.0)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    expected = left * schedule.apply(values / np.linalg.norm(x)) @ right
    found = linalg.msign(jnp.asarray(x, jnp.float32), linalg.NewtonSchulz(schedule, frobenius=True))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("form", [linalg.NewtonSchulz, linalg.GramNewtonSchulz])
@pytest.mark.parametrize("steps", [1, 5])
def test_default_normalisation_is_schatten_norm(steps, form):
    x = conditioned((12, 4), 5.0)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    schedule = linalg.MUON.with_steps(steps)
    expected = left * schedule.apply(values / np.sum(values**8) ** (1 / 8)) @ right
    found = linalg.msign(jnp.asarray(x, jnp.float32), form(schedule))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (64, 8)], ids=str)
@pytest.mark.parametrize("name", ["cubic", "polar express", "degree 7"])
def test_cheaper_form_is_chosen(name, shape):
    direct, chosen = (
        multiplications(form(SCHEDULES[name]).polar, jax.ShapeDtypeStruct(shape, jnp.float32))
        for form in (linalg.NewtonSchulz, linalg.GramNewtonSchulz)
    )
    assert chosen <= direct
    assert (chosen < direct) == (shape == (64, 8))


@pytest.mark.parametrize("form", [linalg.NewtonSchulz, linalg.GramNewtonSchulz])
def test_bfloat16_products_limit_accuracy(form):
    """Rounded operands limit orthogonality to bfloat16 precision."""
    schedule = linalg.PolarExpress(1e-3, safety=1.01, cushion=0.05)
    method = form(schedule, operands=jnp.bfloat16)
    q = np.asarray(
        linalg.msign(jnp.asarray(conditioned((32, 12), 50.0), jnp.float32), method), np.float64
    )
    error = np.linalg.norm(q.T @ q - np.eye(12)) / np.sqrt(12)
    assert 1e-5 < error < 4 * 2.0**-8


def test_gram_form_is_stable_on_clustered_spectra():
    """A few large singular values above a cluster of small values, as in dual ascent iterates.

    With blocks of four steps, rounding lifts the large values past the interval and overflows.
    """
    rng = np.random.default_rng(0)
    method = linalg.GramNewtonSchulz(linalg.DEFAULT_MSIGN.schedule)
    stack = []
    for _ in range(60):
        large, cluster = rng.uniform(0.5, 1, 8), 10 ** rng.uniform(-3, -1)
        values = np.concatenate([large, cluster * rng.uniform(0.1, 1, 56)])
        left = np.linalg.qr(rng.standard_normal((128, 64)))[0]
        right = np.linalg.qr(rng.standard_normal((64, 64)))[0]
        stack.append(left * values @ right.T)
    factors = np.asarray(linalg.msign(jnp.float32(np.stack(stack)), method), np.float64)
    errors = np.linalg.norm(np.swapaxes(factors, -1, -2) @ factors - np.eye(64), axis=(-2, -1))
    assert errors.max() <= 10 * np.finfo(np.float32).eps * 8


def test_skew_form_matches_general_form():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 12, 12)).astype(np.float32)
    x = jnp.asarray(x - np.swapaxes(x, -1, -2))
    plain = linalg.msign(x, linalg.NewtonSchulz(linalg.POLAR_EXPRESS))
    special = linalg.msign(x, linalg.SkewNewtonSchulz(linalg.POLAR_EXPRESS))
    np.testing.assert_allclose(special, plain, atol=2e-5)
    np.testing.assert_allclose(special, -np.swapaxes(special, -1, -2), atol=1e-5)
