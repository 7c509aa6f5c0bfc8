"""`Grassmann` and `low_rank`: optima by a convex solver, invariance, training."""

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Euclidean, Grassmann, Stiefel, low_rank
from manifoldmuon.manifolds.retractions import QR, Polar
from manifoldmuon.norms import FanRatio, RMSToRMS
from manifoldmuon.optim import manifold_muon, project_tree
from tests.compiled import ask, point_of
from tests.manifolds.optima import optimum
from tests.manifolds.training import train


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def steepest(manifold, point, grad):
    return ask(lambda p, g: manifold.steepest(p, g, ()), point, grad)


def horizontal(point, a: cp.Variable) -> list:
    return [point.T @ a == 0] if point.shape[0] > point.shape[1] else [a @ point.T == 0]


@pytest.mark.parametrize(
    ("manifold", "shape"), [(Grassmann(2.0), (6, 3)), (Grassmann(FanRatio()), (3, 5))], ids=str
)
def test_directions_match_convex_solver(manifold, shape):
    w, g = point_of(manifold, shape), normal(0, *shape)
    answer = steepest(manifold, w, g)
    best = optimum(g, manifold.norm, lambda a: horizontal(np.float64(w), a))
    lost = 1 - np.sum(np.float64(g) * np.float64(answer.direction)) / best
    assert -1e-5 < lost <= min(float(answer.gap) + 1e-6, 1e-4)
    assert float(answer.gap) <= 2e-4


def test_steps_are_independent_of_basis():
    manifold = Grassmann(2.0)
    w, g = point_of(manifold, (7, 3)), normal(0, 7, 3)
    turn = np.linalg.qr(normal(1, 3, 3))[0]
    one, other = (steepest(manifold, w @ q, g @ q).direction for q in (np.eye(3, dtype="f"), turn))
    np.testing.assert_allclose(other, one @ turn, atol=1e-5)
    ends = []
    for retraction in (Polar(), QR()):
        moved = ask(Grassmann(2.0, retraction).retract, w, -0.3 * one).astype(np.float64) / 2
        ends.append(moved @ moved.T)
    np.testing.assert_allclose(ends[0], ends[1], atol=2e-6)


def test_training_finds_the_leading_subspace():
    spread = np.diag([4, 3, 2, 0.1, 0.1, 0.1]).astype(np.float32)
    shape = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    _, values, distance = train(Grassmann(), shape, lambda w: 9 - jnp.sum(w * (spread @ w)))
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
    shapes = {"B": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
    shapes["A"] = jax.ShapeDtypeStruct((2, 5), jnp.float32)

    def loss(params):
        return jnp.sum((params["B"] @ params["A"] - target) ** 2)

    params, values, distances = train(geometry, shapes, loss)
    assert values[-1] < 1e-3 * np.sum(target**2)
    assert max(jax.tree.leaves(distances)) < 2e-6
    sizes = [np.linalg.norm(params["B"], 2) / 2, np.linalg.norm(params["A"], 2) / np.sqrt(2 / 5)]
    size = np.linalg.norm(params["B"] @ params["A"], 2) / np.sqrt(8 / 5)
    np.testing.assert_allclose(sizes[0], 1, rtol=1e-6)
    np.testing.assert_allclose(size, sizes[1], rtol=1e-5)
