"""Faulty gradients and unusual leaves, as documented in docs/reliability.md."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.norms import Frobenius, RMSToRMS

GEOMETRY = {
    "tall": Stiefel(),
    "row": Stiefel(),
    "column": Stiefel(),
    "empty": Stiefel(),
    "rows": EmbeddingRows(),
    "bias": Hypersphere(),
    "gain": Euclidean(Frobenius(ndim=0)),
}
SHAPES = {
    "tall": (6, 3),
    "row": (1, 5),
    "column": (5, 1),
    "empty": (0, 3),
    "rows": (4, 3),
    "bias": (4,),
    "gain": (),
}
PARAMS = optim.init_tree(
    GEOMETRY,
    jax.random.key(0),
    {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()},
)
TX = optim.manifold_muon(0.1, GEOMETRY)


def drawn(seed: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: np.float32(scale * rng.standard_normal(s)) for k, s in SHAPES.items()}


@jax.jit
def step(grads, state, params):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


SAFE = optax.apply_if_finite(TX, 10)


@jax.jit
def safe_step(grads, state, params):
    updates, state = SAFE.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def distances(params) -> dict[str, float]:
    return {k: float(d) for k, d in optim.monitor_distance(GEOMETRY, params).items()}


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1.0, 1e30], ids=str)
def test_gradients_of_any_scale_stay_on_manifold(scale):
    params, state = PARAMS, TX.init(PARAMS)
    for seed in range(3):
        params, state = step(drawn(seed, scale), state, params)
    assert max(distances(params).values()) < 4e-6
    for name, before in PARAMS.items():
        assert np.isfinite(params[name]).all()
        if scale != 1e-42:  # XLA may flush denormal momentum to zero
            moved = not np.array_equal(params[name], before)
            assert moved == (scale > 0 and name != "empty")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_gradient_stays_in_its_leaf(value):
    """The momentum keeps it too, unless `apply_if_finite` skips the step."""
    bad = drawn(1) | {"tall": np.full((6, 3), value, np.float32)}
    params, state = step(bad, TX.init(PARAMS), PARAMS)
    assert np.isnan(params["tall"]).all()
    assert np.isfinite(params["rows"]).all()
    params, state = PARAMS, SAFE.init(PARAMS)
    for grads in (drawn(0), bad, drawn(2)):
        params, state = safe_step(grads, state, params)
    wanted, clean = PARAMS, TX.init(PARAMS)
    for grads in (drawn(0), drawn(2)):
        wanted, clean = step(grads, clean, wanted)
    for name in SHAPES:
        np.testing.assert_allclose(params[name], wanted[name], atol=1e-6)


def test_gradient_spike_needs_clipping():
    """Momentum keeps a spike of 1e20 for hundreds of steps; clipped first, it costs a batch."""
    geometry, target = Stiefel(), np.float32(np.eye(6, 3)[::-1])
    spike = 1e20 * np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    start = Stiefel().random_point(jax.random.key(0), (6, 3), jnp.float32)

    def loss_after(tx):
        @jax.jit
        def advance(carry, number):
            params, state = carry
            grad = jnp.where(number == 20, spike, params - target)
            updates, state = tx.update(grad, state, params)
            return (optax.apply_updates(params, updates), state), jnp.sum((params - target) ** 2)

        return jax.lax.scan(advance, (start, tx.init(start)), jnp.arange(80))[1]

    rate = optax.linear_schedule(0.1, 0.01, 80)
    with_clip = loss_after(optim.manifold_muon(rate, geometry, momentum=0.9, clip=1.0))
    without = loss_after(optim.manifold_muon(rate, geometry, momentum=0.9))
    assert with_clip[-1] < 0.05
    assert without[-1] > 0.5


FAR = {"rows": EmbeddingRows(), "sphere": Hypersphere(ndim=2), "bias": Hypersphere(),
       "largest": SpectralSphere(), "ball": SpectralBall(), "band": SpectralBand()}  # fmt: skip
FAR_SHAPES = dict.fromkeys(FAR, (8, 4)) | {"bias": (4,)}


@jax.jit
def two_steps(params):
    tx = optim.manifold_muon(0.1, FAR, momentum=None)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        grads = {k: np.float32(rng.standard_normal(s)) for k, s in FAR_SHAPES.items()}
        updates, _ = tx.update(grads, tx.init(params), params)
        params = optax.apply_updates(params, updates)
    return params, optim.monitor_distance(FAR, params)


@pytest.mark.parametrize("how", [0.1, 1.5, 3.0, 100.0, "gaussian"])
def test_weights_far_from_manifold_return(how):
    """For weights of full rank; He initialisation is Gaussian."""
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in FAR_SHAPES.items()}
    if how == "gaussian":
        rng = np.random.default_rng(7)
        far = {k: np.float32(rng.standard_normal(s) / s[-1] ** 0.5) for k, s in FAR_SHAPES.items()}
    else:
        far = jax.tree.map(lambda x: how * x, optim.init_tree(FAR, jax.random.key(0), shapes))
    params, distances = two_steps(far)
    assert max(distances.values()) < 4e-6
    assert all(np.isfinite(x).all() for x in params.values())


@pytest.mark.parametrize("ones", [0.0, 0.3, 1.0])
def test_spectral_ball_accepts_any_rank(ones):
    ball = {"w": SpectralBall(), "band": SpectralBand()}
    tx = optim.manifold_muon(0.1, ball)
    far = {k: jnp.full((8, 4), ones) for k in ball}
    grads = {k: drawn(3)["tall"][:1, :1] * jnp.eye(8, 4) for k in ball}
    with pytest.raises(ValueError, match="'band' .*project_tree"):
        tx.init(far)
    updates, _ = jax.jit(tx.update)(grads, jax.jit(tx.init)(far), far)
    near = optim.monitor_distance(ball, optax.apply_updates(far, updates))
    assert near["w"] < 4e-6
    assert near["band"] < 2e-4  # inverse roots converge slowly from zero singular values


def test_average_leaves_manifold_and_projection_returns():
    params, state, seen = PARAMS, TX.init(PARAMS), []
    for seed in range(4):
        params, state = step(drawn(seed), state, params)
        seen.append(params)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *seen)
    assert distances(mean)["tall"] > 1e-3
    assert max(distances(optim.project_tree(GEOMETRY, mean)).values()) < 4e-6


def test_rank_deficient_gradients_give_valid_steps():
    grads = drawn(0)
    grads["tall"] = np.outer(np.ones(6), np.arange(3.0)).astype(np.float32)
    tx = optim.muon(0.1, Euclidean(RMSToRMS()))
    update = jax.jit(tx.update)(grads["tall"], tx.init(grads["tall"]), grads["tall"])[0]
    assert np.linalg.matrix_rank(update, tol=1e-3) == 1
    params, _ = step(grads, TX.init(PARAMS), PARAMS)
    assert max(distances(params).values()) < 4e-6
