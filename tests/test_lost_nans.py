"""A NaN among many numbers: from 4096 on, XLA's maximum on CPUs drops NaNs, along any axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import EmbeddingRows, Hypersphere
from manifoldmuon.modules import Linear
from tests.compiled import ask, point_of
from tests.instances import MANIFOLDS, NORMS

COPIES, BAD = 4096, 1234
SETS = [case for case in MANIFOLDS if case.manifold.constrained]


def spoiled(x: np.ndarray) -> np.ndarray:
    """Put a NaN into copy number `BAD`."""
    x = x.copy()
    x[BAD].flat[-1] = np.nan
    return x


@pytest.mark.slow_except("infinity", "embedding", "spectral tall")
@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_norm_of_copy_with_nan_is_nan(case):
    x = np.random.default_rng(0).standard_normal((COPIES, *case.shape)).astype(np.float32)
    bad = np.zeros((COPIES, *case.shape), bool)
    bad[BAD].flat[-1] = True
    ndim = case.norm.ndim
    wanted = bad.any(axis=tuple(range(bad.ndim - ndim, bad.ndim))) if ndim else bad
    np.testing.assert_array_equal(np.isnan(ask(case.norm.norm, spoiled(x))), wanted)


@pytest.mark.slow_except("spheres of radius 3", "embedding rows", "stiefel tall", "spectral ball")
@pytest.mark.parametrize("case", SETS, ids=lambda case: case.name)
def test_distance_of_copy_with_nan_is_nan(case):
    copies = case.manifold.stacked(1 + len(case.shape) - case.manifold.ndim)

    def distances(x):
        return case.manifold.distance(x), optim.monitor_distance(copies, {"w": x})["w"]

    points = spoiled(point_of(case.manifold, (COPIES, *case.shape)))
    found, reported = ask(distances, points)
    assert np.isnan(found[BAD]).any()
    assert np.isfinite(np.delete(found, BAD, axis=0)).all()
    assert np.isnan(reported)


def test_nan_entry_makes_whole_array_nan():
    rows = spoiled(np.ones((COPIES, 2), np.float32))
    assert np.isnan(EmbeddingRows().distance(jnp.asarray(rows)))
    assert np.isnan(EmbeddingRows().norm.norm(jnp.asarray(rows)))
    weight = jnp.ones((64, 64)).at[3, 5].set(jnp.nan)
    assert np.isnan(Linear(64, 64).norm(weight))
    assert np.isnan(optim.monitor_distance(Hypersphere(ndim=2), {"w": weight})["w"])


def test_nan_in_quantized_momentum_is_kept():
    params = {"w": jnp.ones((64, 128))}
    tx = contrib.quantized(optax.trace(0.9))
    grads = np.ones((64, 128), np.float32)
    grads[3, 5] = np.nan
    _, state = tx.update({"w": jnp.asarray(grads)}, tx.init(params), params)
    found: Any = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)[0]
    assert np.isnan(found["w"][3, 5])
