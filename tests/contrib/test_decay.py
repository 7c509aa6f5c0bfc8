"""Weight decay in its variants, against the published lines in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS

FLAT, MUON = Euclidean(), Euclidean(RMSToRMS())


def once(tx: Any, updates: Any, params: Any) -> Any:
    return jax.jit(tx.update)(updates, tx.init(params), params)[0]


def test_cautious_decay_is_the_published_line():
    """`x <- x - eta (u + lambda [u x >= 0] x)`, from every pair of signs and zeros."""
    values = np.array([-2.0, -1e-30, 0.0, 1e-30, 3.0], np.float32)
    u, x = (a.ravel() for a in np.meshgrid(values, values))
    tx = optim.chain(
        contrib.add_cautious_weight_decay(0.3, FLAT), optax.scale_by_learning_rate(0.1)
    )
    wanted = -0.1 * (u + 0.3 * (np.float64(u) * np.float64(x) >= 0) * x)
    np.testing.assert_allclose(once(tx, u, x), wanted, rtol=1e-6)


def test_plain_scheduled_decay_if_all_signs_agree():
    schedule = optax.linear_schedule(0.5, 0.1, 3)
    cautious, plain = (
        contrib.add_cautious_weight_decay(schedule, FLAT),
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
    decay = contrib.add_cautious_weight_decay(0.5, geometry)
    alias = optim.manifold_muon(0.1, geometry, None, weight_decay=decay)
    towards = {"free": jnp.array([1.0, 0.0]), "ball": jnp.array([0.8, -0.6])}
    found = once(alias, towards, params)
    np.testing.assert_allclose(found["free"], -0.1 * np.array([1 + 1.5, 2.0]), rtol=1e-6)
    plain = once(optim.manifold_muon(0.1, geometry, None), towards, params)
    np.testing.assert_array_equal(found["ball"], plain["ball"])


SETS = {
    "w": Stiefel(2.0).with_axes(-2, -1),
    "heads": Stiefel().with_axes(out_blocks=2),
    "ball": Hypersphere(3.0),
    "free": FLAT,
}
STEPS = {"w": MUON, "heads": MUON, "ball": FLAT, "free": FLAT}
SHAPES = {"w": (2, 3, 5), "heads": (8, 3), "ball": (4,), "free": (4,)}


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_decay_towards_the_nearest_point():
    """`u + decay (w - project(w))`, with projections by an SVD in float64."""
    w = drawn()
    u = {name: np.ones_like(x) for name, x in w.items()}
    nearest = {
        "w": 2 * polar(w["w"].astype(float)),
        "heads": np.concatenate([polar(head) for head in np.split(w["heads"].astype(float), 2)]),
        "ball": 3 * w["ball"] / np.linalg.norm(w["ball"]),
        "free": w["free"],
    }
    found = once(contrib.add_decay_towards(0.3, STEPS, SETS), u, w)
    for name, x in w.items():
        np.testing.assert_allclose(found[name], 1 + 0.3 * (x - nearest[name]), atol=1e-5)


def test_without_gradients_the_distance_shrinks_by_the_rate():
    decay = contrib.add_decay_towards(optax.constant_schedule(0.5), STEPS, SETS)
    tx = optim.muon(0.2, STEPS, weight_decay=decay)
    params: Any = drawn()
    zeros, state = jax.tree.map(np.zeros_like, params), tx.init(params)
    update, distance = jax.jit(tx.update), jax.jit(lambda p: optim.monitor_distance(SETS, p))
    for _ in range(3):
        before = distance(params)
        updates, state = update(zeros, state, params)
        params = optax.apply_updates(params, updates)
        after = distance(params)
        for name in SHAPES:
            np.testing.assert_allclose(after[name], 0.9 * before[name], rtol=1e-4, atol=1e-6)


def test_a_leaf_that_its_retraction_holds_is_not_decayed_as_well():
    link = contrib.add_decay_towards(0.1, {"w": Stiefel(), "b": FLAT}, Hypersphere())
    with pytest.raises(ValueError, match=r"\['w'\] lie on constrained manifolds"):
        link.init({"w": jnp.eye(3), "b": jnp.ones(3)})


@pytest.mark.parametrize("rate", [-0.1, float("nan")])
def test_a_negative_decay_is_refused(rate):
    message = r"weight_decay must be a finite number in \[0, inf\) or a schedule; got"
    with pytest.raises(ValueError, match=f"add_cautious_weight_decay: {message}"):
        contrib.add_cautious_weight_decay(rate, FLAT)
    with pytest.raises(ValueError, match=f"add_decay_towards: {message}"):
        contrib.add_decay_towards(rate, FLAT, FLAT)
