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
    method = form(linalg.PolarExpress(1e-3, safety=1.01, cushion=0.05), operands=jnp.bfloat16)
    q = np.asarray(linalg.msign(jnp.float32(conditioned((32, 12), 50.0)), method), np.float64)
    error = np.linalg.norm(q.T @ q - np.eye(12)) / np.sqrt(12)
    assert 1e-5 < error < 4 * 2.0**-8


def test_gram_form_is_stable_on_clustered_spectra():
    """A few large singular values above a cluster of small values, as in dual ascent iterates.

    With blocks of four steps, rounding lifts the large values past the interval and overflows.
    """
    rng = np.random.default_rng(0)
    method = linalg.GramNewtonSchulz(linalg.DEFAULT_MSIGN.schedule)
    cluster = 10 ** rng.uniform(-3, -1, (60, 1)) * rng.uniform(0.1, 1, (60, 56))
    values = np.concatenate([rng.uniform(0.5, 1, (60, 8)), cluster], axis=1)
    left, right = (np.linalg.qr(rng.standard_normal((60, size, 64)))[0] for size in (128, 64))
    factors = np.asarray(
        linalg.msign(jnp.float32(left * values[:, None] @ right.mT), method), np.float64
    )
    errors = np.linalg.norm(factors.mT @ factors - np.eye(64), axis=(-2, -1))
    assert errors.max() <= 10 * np.finfo(np.float32).eps * 8


def test_skew_form_matches_general_form():
    x = jnp.float32(np.random.default_rng(0).standard_normal((3, 12, 12)))
    plain, special = (
        linalg.msign(x - x.mT, form(linalg.POLAR_EXPRESS))
        for form in (linalg.NewtonSchulz, linalg.SkewNewtonSchulz)
    )
    np.testing.assert_allclose(special, plain, atol=2e-5)
    np.testing.assert_allclose(special, -special.mT, atol=1e-5)
