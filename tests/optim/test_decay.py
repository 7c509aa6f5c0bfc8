"""Weight decay in its variants, against the published lines in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere

FLAT = Euclidean()


def once(tx: Any, updates: Any, params: Any) -> Any:
    return jax.jit(tx.update)(updates, tx.init(params), params)[0]


def test_cautious_decay_is_the_published_line():
    """`x <- x - eta (u + lambda [u x >= 0] x)`, from every pair of signs and zeros."""
    values = np.array([-2.0, -1e-30, 0.0, 1e-30, 3.0], np.float32)
    u, x = (a.ravel() for a in np.meshgrid(values, values))
    tx = optim.chain(optim.add_cautious_weight_decay(0.3, FLAT), optax.scale_by_learning_rate(0.1))
    wanted = -0.1 * (u + 0.3 * (np.float64(u) * np.float64(x) >= 0) * x)
    np.testing.assert_allclose(once(tx, u, x), wanted, rtol=1e-6)


def test_where_all_signs_agree_it_is_plain_decay_on_a_schedule():
    schedule = optax.linear_schedule(0.5, 0.1, 3)
    cautious, plain = (
        optim.add_cautious_weight_decay(schedule, FLAT),
        optax.add_decayed_weights(schedule),
    )
    params = jnp.array([1.0, -2.0, 0.5])
    states: list[Any] = [cautious.init(params), plain.init(params)]
    for _ in range(4):
        found, states[0] = cautious.update(0.1 * params, states[0], params)
        wanted, states[1] = plain.update(0.1 * params, states[1], params)
        np.testing.assert_array_equal(found, wanted)


def test_constrained_leaves_are_not_decayed_and_the_aliases_take_the_link():
    geometry = {"free": FLAT, "ball": Hypersphere()}
    params = {"free": jnp.array([3.0, 4.0]), "ball": jnp.array([0.6, 0.8])}
    decay = optim.add_cautious_weight_decay(0.5, geometry)
    alias = optim.manifold_muon(0.1, geometry, None, weight_decay=decay)
    towards = {"free": jnp.array([1.0, 0.0]), "ball": jnp.array([0.8, -0.6])}
    found = once(alias, towards, params)
    np.testing.assert_allclose(found["free"], -0.1 * np.array([1 + 1.5, 2.0]), rtol=1e-6)
    plain = once(optim.manifold_muon(0.1, geometry, None), towards, params)
    np.testing.assert_array_equal(found["ball"], plain["ball"])


@pytest.mark.parametrize("rate", [-0.1, float("nan")])
def test_a_negative_decay_is_refused(rate):
    with pytest.raises(ValueError, match="weight_decay must be 0 or more; got"):
        optim.add_cautious_weight_decay(rate, FLAT)
