"""Faulty gradients and unusual leaves, as documented in docs/reliability.md."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import manifolds, optim
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.norms import Frobenius, RMSToRMS
from tests.optim.instances import abstract
from tests.optim.training import drawn, first_update, train

GEOMETRY = dict.fromkeys(("tall", "row", "column", "empty"), manifolds.Stiefel()) | {
    "rows": manifolds.EmbeddingRows(),
    "bias": manifolds.Hypersphere(),
    "gain": manifolds.Euclidean(Frobenius(ndim=0)),
}
SHAPES = {"tall": (6, 3), "row": (1, 5), "column": (5, 1), "empty": (0, 3), "rows": (4, 3)}
SHAPES |= {"bias": (4,), "gain": ()}
PARAMS = optim.init_tree(GEOMETRY, jax.random.key(0), abstract(SHAPES))
TX = optim.manifold_muon(0.1, GEOMETRY)


def test_infinite_gradient_stays_in_its_leaf():
    bad = drawn(1, SHAPES) | {"tall": np.full((6, 3), np.inf, np.float32)}
    params, _ = train(TX, PARAMS, [bad])
    assert np.isnan(params["tall"]).all()
    assert np.isfinite(params["rows"]).all()


HUGE = {
    "riemannian_adam": (optim.riemannian_adam(0.1, manifolds.Stiefel()), 0),
    "adamh": (optim.adamh(0.1, manifolds.Hypersphere(ndim=2)), 0),
    "optax_muon": (optim.optax_muon(0.1), 0),
    "optax_muon, method": (optim.optax_muon(0.1, method=TRAINING_MSIGN), 1),
    "muonh": (optim.muonh(0.1, manifolds.Hypersphere(ndim=2)), 1),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_gradients_keep_their_direction_or_stop(name):
    (tx, share), point = HUGE[name], jnp.eye(6, 3)
    grads = jnp.asarray(drawn(2, {"w": (6, 3)})["w"])

    def update(scale: float) -> Any:
        return tx.update(scale * grads, tx.init(point), point)[0]

    np.testing.assert_allclose(update(2.0**100), share * update(1.0), rtol=0, atol=1e-5)


FAR = {
    "rows": manifolds.EmbeddingRows(),
    "sphere": manifolds.Hypersphere(ndim=2),
    "bias": manifolds.Hypersphere(),
    "largest": manifolds.SpectralSphere(),
    "ball": manifolds.SpectralBall(),
    "band": manifolds.SpectralBand(),
}
FAR_SHAPES = dict.fromkeys(FAR, (8, 4)) | {"bias": (4,)}


@jax.jit
def two_steps(params):
    tx = optim.start_anywhere(optim.manifold_muon(0.1, FAR, momentum=None))
    for seed in range(2):
        updates, _ = tx.update(drawn(seed, FAR_SHAPES), tx.init(params), params)
        params = optax.apply_updates(params, updates)
    return params, optim.monitor_distance(FAR, params)


@pytest.mark.slow
@pytest.mark.parametrize("how", [0.1, 1.5, 3.0, 100.0, "gaussian"])
def test_weights_far_from_manifold_return(how):
    """For weights of full rank; He initialisation is Gaussian."""
    if how == "gaussian":
        far = jax.tree.map(lambda x: x / x.shape[-1] ** 0.5, drawn(7, FAR_SHAPES))
    else:
        near = optim.init_tree(FAR, jax.random.key(0), abstract(FAR_SHAPES))
        far = jax.tree.map(lambda x: how * x, near)
    params, distances = two_steps(far)
    assert max(distances.values()) < 4e-6
    assert all(np.isfinite(x).all() for x in params.values())


@pytest.mark.slow
@pytest.mark.parametrize("ones", [0.0, 0.3, 1.0])
def test_spectral_ball_accepts_any_rank(ones):
    ball = {"w": manifolds.SpectralBall(), "band": manifolds.SpectralBand()}
    tx = optim.manifold_muon(0.1, ball)
    far = {k: jnp.full((8, 4), ones) for k in ball}
    grads = {k: drawn(3, SHAPES)["tall"][:1, :1] * jnp.eye(8, 4) for k in ball}
    with pytest.raises(ValueError, match="'band' .*project_tree"):
        tx.init(far)
    updates, _ = jax.jit(tx.update)(grads, optim.start_anywhere(tx).init(far), far)
    near = optim.monitor_distance(ball, optax.apply_updates(far, updates))
    assert near["w"] < 4e-6
    assert near["band"] < 2e-4  # inverse roots converge slowly from zero singular values


@pytest.mark.slow
def test_rank_deficient_gradients_give_valid_steps():
    grads = drawn(0, SHAPES)
    grads["tall"] = np.outer(np.ones(6), np.arange(3.0)).astype(np.float32)
    tx = optim.muon(0.1, manifolds.Euclidean(RMSToRMS()))
    update = first_update(tx, grads["tall"], grads["tall"])
    assert np.linalg.matrix_rank(update, tol=1e-3) == 1
    params, _ = train(TX, PARAMS, [grads])
    assert max(optim.monitor_distance(GEOMETRY, params).values()) < 4e-6
