"""`manifold_muon` on each set: the loss falls, points stay on the set, gaps stay small."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
)
from manifoldmuon.manifolds.retractions import SoftCap
from manifoldmuon.manifolds.solvers import BarzilaiBorwein, DouglasRachford
from manifoldmuon.norms import RootRank, Spectral

QUICK = Spectral(TRAINING_MSIGN)
# Each set with the gap and the distance allowed at training precision.
SPACES: dict[str, tuple[Manifold, float, float]] = {
    "fixed Frobenius": (Hypersphere(RootRank(), ndim=2, step_norm=QUICK), 0.1, 1e-6),
    "rows": (EmbeddingRows(1.0, step_norm=QUICK, solver=BarzilaiBorwein()), 0.1, 1e-6),
    "rows, one sign": (EmbeddingRows(1.0, step_norm=QUICK, solver=BarzilaiBorwein(1)), 0.2, 1e-6),
    "spectral sphere": (SpectralSphere(step_norm=QUICK), 0.1, 1e-6),
    "ball": (SpectralBall(step_norm=QUICK, solver=DouglasRachford(5)), 0.2, 2e-6),
    "ball, soft cap": (SpectralBall(step_norm=QUICK, solver=None, retraction=SoftCap()), 0.1, 1e-6),
    "band": (SpectralBand(0.5, 2.0, step_norm=QUICK, solver=None), 0.1, 2e-6),
}


@pytest.mark.slow_except("ball")
@pytest.mark.parametrize("name", SPACES)
def test_manifold_muon_fits_target(name):
    space, gap, distance = SPACES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (24, 12)
    point = space.random_point(keys[0], shape, jnp.float32)
    # A target on the set, so that the loss can fall to zero.
    goal = space.random_point(keys[1], shape, jnp.float32)
    inputs = jax.random.normal(keys[2], (64, 12))
    rate = optax.cosine_decay_schedule(0.1, 120)
    tx = optim.manifold_muon(rate, space, momentum=0.9)

    def loss_of(weight):
        return jnp.mean((inputs @ (weight - goal).T) ** 2)

    def step(carry, _):
        weight, state = carry
        loss, grad = jax.value_and_grad(loss_of)(weight)
        updates, state = tx.update(grad, state, weight)
        found = optim.monitor(state)["gap"][""], space.distance(weight), loss
        return (optax.apply_updates(weight, updates), state), found

    run = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=120))
    (last, _), (gaps, distances, losses) = run(point)
    assert loss_of(last) <= 0.02 * losses[0]
    assert np.median(gaps[:80]) <= gap
    assert np.max(distances) <= distance
