"""Cautious updates, against the published line in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere
from manifoldmuon.norms import RMSToRMS

MUON = Euclidean(RMSToRMS())


def second_step(tx: Any, first: Any, second: Any, params: Any) -> np.ndarray:
    """What momentum makes of a gradient that has turned around in some entries."""

    @jax.jit
    def steps(first, second, params):
        _, state = tx.update(first, tx.init(params), params)
        return tx.update(second, state, params)[0]

    return np.asarray(steps(first, second, params), float)


def drawn(*shape: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(3))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_published_line(momentum):
    """Each matrix of a stack by itself; without momentum nothing is taken away."""
    first, second, params = drawn(2, 3, 5)
    found = second_step(
        contrib.cautious(optax.trace(momentum), MUON.transposed()), first, second, params
    )
    u = momentum * first.astype(float) + second
    mask = u * second > 0
    wanted = u * mask / mask.mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert (momentum == 0) == mask.all()


def test_no_move_if_all_signs_disagree():
    first, _, params = drawn(4)
    tx = contrib.cautious(optax.trace(0.9), Euclidean())
    np.testing.assert_array_equal(second_step(tx, first, -0.1 * first, params), np.zeros(4))


@pytest.mark.slow_except("manifold0")
@pytest.mark.parametrize("manifold", [EmbeddingRows(), Hypersphere(ndim=2)])
def test_on_a_constrained_manifold_the_step_stays_tangent(manifold):
    first, second, noise = drawn(6, 3)
    point = manifold.project(jnp.asarray(noise))
    base = optax.chain(optax.trace(0.9), optim.scale_by_steepest(manifold))
    plain = second_step(base, first, second, point)
    found = second_step(contrib.cautious(base, manifold), first, second, point)
    kept = plain * (plain * second > 0)
    wanted = np.asarray(manifold.project_tangent(point, jnp.asarray(kept, jnp.float32)), float)
    wanted *= np.linalg.norm(plain) / np.linalg.norm(wanted)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    again = manifold.project_tangent(point, jnp.asarray(found, jnp.float32))
    np.testing.assert_allclose(again, found, atol=1e-5)
