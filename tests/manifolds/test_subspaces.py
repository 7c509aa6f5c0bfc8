"""`Grassmann` and `low_rank`: optima by a convex solver, invariance, training."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon.manifolds import Euclidean, Grassmann, Stiefel, low_rank
from manifoldmuon.manifolds.retractions import QR, Polar
from manifoldmuon.norms import FanRatio, RMSToRMS
from manifoldmuon.optim import init_tree, manifold_muon, monitor_distance, project_tree
from tests.compiled import ask, point_of
from tests.manifolds.optima import optimum


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def train(geometry, shapes, loss):
    """Return the last parameters, the losses, and the distances from the sets."""
    tx = manifold_muon(optax.linear_schedule(0.3, 0.0, 200), geometry, momentum=0.5)

    @jax.jit
    def run(key):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        params = init_tree(geometry, key, shapes)
        (params, _), values = jax.lax.scan(step, (params, tx.init(params)), length=200)
        return params, values, monitor_distance(geometry, params)

    return jax.device_get(run(jax.random.key(0)))


def horizontal(point, a: cp.Variable) -> list:
    return [point.T @ a == 0] if point.shape[0] > point.shape[1] else [a @ point.T == 0]


@pytest.mark.parametrize(
    ("manifold", "shape"), [(Grassmann(2.0), (6, 3)), (Grassmann(FanRatio()), (3, 5))], ids=str
)
def test_directions_match_convex_solver(manifold, shape):
    w, g = point_of(manifold, shape), normal(0, *shape)
    answer = ask(manifold.steepest, w, g)
    best = optimum(g, manifold.norm, lambda a: horizontal(np.float64(w), a))
    lost = 1 - np.sum(np.float64(g) * np.float64(answer.direction)) / best
    assert -1e-5 < lost <= min(float(answer.gap) + 1e-6, 1e-4)
    assert float(answer.gap) <= 2e-4


def test_steps_are_independent_of_basis():
    manifold = Grassmann(2.0)
    w, g = point_of(manifold, (7, 3)), normal(0, 7, 3)
    turn = np.linalg.qr(normal(1, 3, 3))[0]
    one, other = (ask(manifold.steepest, w @ q, g @ q)[0] for q in (np.eye(3, dtype="f"), turn))
    np.testing.assert_allclose(other, one @ turn, atol=1e-5)
    ends = [ask(Grassmann(2.0, r).retract, w, -0.3 * one) / 2 for r in (Polar(), QR())]
    np.testing.assert_allclose(*(end @ end.T for end in ends), atol=2e-6)


def test_training_finds_the_leading_subspace():
    spread = np.diag(np.asarray([4, 3, 2, 0.1, 0.1, 0.1], np.float32))
    loss = lambda w: 9 - jnp.sum(w * (spread @ w))  # noqa: E731
    _, values, distance = train(Grassmann(), jnp.zeros((6, 3)), loss)
    assert values[-1] < 2e-3 * values[0]
    assert max(jax.tree.leaves(distance)) < 2e-6


def test_adapter_with_zero_b_is_told_which_factor_to_constrain():
    """PEFT's convention: projecting B = 0 would change the pretrained model."""
    adapter = {"A": normal(2, 2, 5), "B": np.zeros((8, 2), np.float32)}
    with pytest.raises(ValueError, match=r"zeros of \['B'\]: project_tree would change .*zero='B'"):
        manifold_muon(0.1, low_rank((8, 5), 2)).init(adapter)
    with pytest.warns(UserWarning, match=r"zeros of \['B'\].* Let a factor .*zero='B'"):
        project_tree(low_rank((8, 5), 2), adapter)
    geometry = low_rank((8, 5), 2, zero="B")
    assert geometry == {"A": Stiefel(FanRatio()), "B": Euclidean(RMSToRMS())}
    projected = project_tree(geometry, adapter)
    np.testing.assert_array_equal(projected["B"] @ projected["A"], np.zeros((8, 5)))
    manifold_muon(0.1, geometry).init(projected)


def test_training_fits_low_rank_adapter():
    """Fit a matrix of rank 2 and RMS-to-RMS norm 1.4 by B A."""
    geometry = low_rank((8, 5), 2)
    assert geometry == {"B": Stiefel(FanRatio()), "A": Euclidean(RMSToRMS())}
    target = np.float32(0.3) * normal(0, 8, 2) @ normal(1, 2, 5)
    shapes = {"B": jnp.zeros((8, 2)), "A": jnp.zeros((2, 5))}
    params, values, distances = train(
        geometry, shapes, lambda p: jnp.sum((p["B"] @ p["A"] - target) ** 2)
    )
    assert values[-1] < 1e-3 * np.sum(target**2)
    assert max(jax.tree.leaves(distances)) < 2e-6
    size = lambda w: np.linalg.norm(w, 2) / np.sqrt(w.shape[0] / w.shape[1])  # noqa: E731
    np.testing.assert_allclose(size(params["B"]), 1, rtol=1e-6)
    np.testing.assert_allclose(size(params["B"] @ params["A"]), size(params["A"]), rtol=1e-5)
