"""Points and directions against NumPy in float64, and edge cases."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from manifoldmuon.linalg import MUON, NewtonSchulz
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Euclidean,
    Hypersphere,
    Manifold,
    Orthogonal,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds._stiefel import polar_by_products
from manifoldmuon.manifolds.solvers import BarzilaiBorwein, DualAscent, SkewPolar
from manifoldmuon.norms import FanRatio, Frobenius, RootDim, Spectral
from tests.compiled import ask, point_of
from tests.tolerances import rounding


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def name(value) -> str:
    return type(value).__name__ if isinstance(value, Manifold) else str(value)


def largest_deviation(matrix, scale: float) -> float:
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return float(np.abs(values / scale - 1).max())


@pytest.mark.parametrize(
    ("manifold", "shape", "scale"),
    [
        (Stiefel(), (7, 4), 1.0),
        (Stiefel(0.3), (2, 6), 0.3),
        (Stiefel(FanRatio(2.0)), (8, 2), 4.0),
        (Orthogonal(FanRatio(1.5)), (5, 5), 1.5),
    ],
    ids=name,
)
def test_matrix_manifolds_match_svd(rng, manifold, shape, scale):
    """Check projection, random points, distance and norm by singular values."""
    x = normal(rng, *shape)
    point = point_of(manifold, shape)
    assert largest_deviation(point, scale) < 1e-6
    given = np.stack([x, point, 1.0001 * point, np.zeros_like(x)])
    found, distances, norms = ask(
        lambda y: (manifold.project(y), manifold.distance(y), manifold.norm.norm(y)), given
    )
    polar = scipy.linalg.polar(x.astype(np.float64))[0]
    close = scale * rounding(4, max(shape), np.linalg.cond(x))
    np.testing.assert_allclose(found[0], scale * polar, atol=close)
    wanted = [largest_deviation(y, scale) for y in given]
    np.testing.assert_allclose(distances, wanted, atol=5e-7, rtol=1e-5)
    np.testing.assert_allclose(norms[0], np.linalg.norm(x, 2) / scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("manifold", "radius"),
    [(Hypersphere(2.0), 2.0), (Hypersphere(RootDim(0.5)), 0.5 * np.sqrt(6))],
    ids=name,
)
def test_spheres_match_numpy(rng, manifold, radius):
    x, g = normal(rng, 6), normal(rng, 6)
    unit, length = x / np.linalg.norm(x), np.linalg.norm(x)
    tangent = g - unit * (unit @ g)
    direction = radius * tangent / np.linalg.norm(tangent)
    np.testing.assert_allclose(ask(manifold.project, x), radius * unit, rtol=2e-6)
    np.testing.assert_allclose(ask(manifold.distance, x), abs(length / radius - 1), rtol=1e-5)
    np.testing.assert_allclose(ask(manifold.project_tangent, x, g), tangent, atol=1e-6)
    np.testing.assert_allclose(ask(manifold.steepest, x, g).direction, direction, atol=2e-6)


def test_orthogonal_direction_attains_upper_bound(rng):
    """The value is half the nuclear norm of `W^T G - G^T W`, the upper bound over all tangents."""
    w, g = point_of(Orthogonal(), (5, 5)), normal(rng, 5, 5)  # odd skew matrices are singular
    inner = w.astype(np.float64).T @ g.astype(np.float64)
    optimum = np.linalg.svd(inner - inner.T, compute_uv=False).sum() / 2
    answer = ask(Orthogonal().steepest, w, g)
    np.testing.assert_allclose(np.sum(np.float64(g) * answer.direction), optimum, rtol=1e-4)
    assert 0 <= answer.gap < 1e-4
    # Five steps of Muon's polynomial miss the optimum, and the gap shows it.
    short = ask(Orthogonal(solver=SkewPolar(NewtonSchulz(MUON))).steepest, w, g)
    loss = 1 - np.sum(np.float64(g) * short.direction) / optimum
    assert max(loss, 0.01) <= short.gap < 0.6


@pytest.mark.parametrize("shape", [(3, 7), (4, 4)], ids=str)
def test_frobenius_steepest_is_riemannian_gradient(rng, shape):
    """Compare with the closed form of the tangent part, scaled to the norm's size."""
    manifold = Stiefel(2.0, step_norm=Frobenius(scale=5.0))
    w, g = point_of(manifold, shape), normal(rng, *shape)
    unit = np.float64(w) / 2
    part = g - (unit @ g.T + g @ unit.T) @ unit / 2  # at points with orthonormal rows
    answer = ask(manifold.steepest, w, g)
    np.testing.assert_allclose(answer.direction, 5 * part / np.linalg.norm(part), atol=5e-6)
    assert answer.dual == ()
    assert 0 < answer.gap < rounding(4, w.size)


def test_stale_rows_do_not_move(rng):
    manifold = EmbeddingRows()
    w, g = point_of(manifold, (6, 4)).copy(), normal(rng, 6, 4)
    # A token unseen for hundreds of steps of momentum, a rare token, a zero row, a padding token.
    g[1:5] *= np.asarray([1e-30, 1e-4, 0, 0], np.float32)[:, None]
    w[4] = 0

    answer = ask(manifold.steepest, w, g)
    moved = ask(manifold.retract, w, -0.1 * answer.direction)
    np.testing.assert_array_equal(answer.direction[[1, 3, 4]], 0)
    np.testing.assert_array_equal(moved[[1, 3, 4]], w[[1, 3, 4]])
    lengths = np.linalg.norm(answer.direction[[0, 2, 5]], axis=1)
    np.testing.assert_allclose(lengths, 2, rtol=1e-5)
    assert 0 <= answer.gap < rounding(8, w.size)
    np.testing.assert_allclose(ask(manifold.distance, moved), 1)  # the padding row


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_projection_of_rank_deficient_points(rng, dtype):
    """Zero and (nearly) rank-deficient matrices project to one of the nearest points."""
    eps = float(jnp.finfo(dtype).eps)
    low = normal(rng, 6, 1) @ normal(rng, 1, 4)
    close = np.diag([1, 1e-3, 1e-9, 0]).astype(np.float32) @ normal(rng, 4, 4)
    rows = np.concatenate([close, np.zeros((2, 4), np.float32)])
    given = jnp.asarray(np.stack([np.zeros((6, 4)), low, rows, normal(rng, 6, 4)]), dtype)
    found = np.asarray(ask(Stiefel(2.0).project, given), np.float64)
    for x, point in zip(np.asarray(given, np.float64), found, strict=True):
        assert largest_deviation(point, 2.0) < 8 * eps
        values = np.linalg.svd(x, compute_uv=False)
        nearest = np.sum((values - 2) ** 2)  # Eckart and Young
        np.testing.assert_allclose(np.sum((x - point) ** 2), nearest, rtol=8 * eps)
    np.testing.assert_array_equal(found[0], 2 * np.eye(6, 4))
    square = ask(Orthogonal().project, jnp.zeros((3, 3), dtype))
    np.testing.assert_array_equal(np.abs(np.float64(square)), np.eye(3))
    table = ask(EmbeddingRows(2.0).project, given[2])
    np.testing.assert_allclose(np.float64(table[-1]), 1.0)
    assert np.max(ask(EmbeddingRows(2.0).distance, table)) < 4 * eps
    sphere = ask(Hypersphere(ndim=2).project, jnp.zeros((2, 2), dtype))
    np.testing.assert_allclose(np.float64(sphere), 0.5)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (4, 2)])
def test_polar_by_products_matches_singular_values(shape):
    """On TPUs in place of singular vectors: all matrices of 0, 1 and -1, most rank-deficient."""
    entries = np.array(list(itertools.product((0, 1, -1), repeat=shape[0] * shape[1])))
    given = np.float64(entries.reshape(-1, *shape))
    factor = np.asarray(ask(polar_by_products, np.float32(given)), np.float64)
    np.testing.assert_allclose(factor.mT @ factor - np.eye(shape[1]), 0, atol=2e-6)
    nuclear = np.linalg.norm(given, "nuc", axis=(-2, -1))
    np.testing.assert_allclose(np.sum(factor * given, (-2, -1)), nuclear, atol=1e-6)


@pytest.mark.parametrize("manifold", [Stiefel(), Hypersphere(ndim=2), EmbeddingRows()], ids=name)
def test_tangent_parts_of_huge_vectors(rng, manifold):
    w, v = point_of(manifold, (6, 4)), normal(rng, 6, 4)
    huge, part = ask(manifold.project_tangent, np.stack([w, w]), np.stack([1e38 * v, v]))
    np.testing.assert_allclose(huge / 1e38, part, atol=1e-5)


def test_nearly_normal_gradient_keeps_its_direction():
    """A tangent part of 1e-5 is resolved, free of the normal part's rounding."""
    answer = ask(
        Hypersphere().steepest, np.eye(4, dtype="f")[0], np.asarray([1, 1e-5, -1e-5, 0], np.float32)
    )
    np.testing.assert_allclose(answer.direction, np.array([0, 1, -1, 0]) / np.sqrt(2), atol=1e-6)


@pytest.mark.parametrize(
    ("manifold", "shape"),
    [
        (Stiefel(), (2, 4, 0)),
        (Orthogonal(), (0, 0)),
        (Hypersphere(), (0,)),
        (EmbeddingRows(), (0, 4)),
        (EmbeddingRows(), (3, 0)),
        (Euclidean(Spectral()), (0, 4)),
    ],
    ids=name,
)
def test_empty_points_keep_shape(manifold, shape):
    manifold.check_shape(shape)
    empty = point_of(manifold, shape)
    answer = ask(manifold.steepest, empty, empty)
    moved, projected = ask(lambda x: (manifold.retract(x, x), manifold.project(x)), empty)
    assert {x.shape for x in (answer.direction, moved, projected, empty)} == {shape}
    copies = shape[: len(shape) - manifold.ndim]
    np.testing.assert_array_equal(answer.gap, np.zeros(copies))
    assert ask(manifold.distance, empty).shape == copies


@pytest.mark.parametrize("manifold", [Hypersphere(1e3, ndim=2), Stiefel(1e-3)], ids=name)
def test_learning_rate_is_an_angle(rng, manifold):
    """A step of 0.1 rotates a point of any scale by the same angle."""
    w, g = point_of(manifold, (4, 4)), normal(rng, 4, 4)
    direction = ask(manifold.steepest, w, g).direction
    turned = ask(manifold.retract, w, -0.1 * direction) - w
    size, angle = (ask(manifold.norm.norm, x) for x in (direction, turned))
    np.testing.assert_allclose(size, 1, rtol=1e-4)
    np.testing.assert_allclose(angle, 2 * np.sin(np.arctan(0.1) / 2), rtol=2e-3)


def test_random_points_are_uniform():
    """Under Haar measure entries have mean 0 and second moment 1/m, within 4 standard errors."""
    stack = point_of(Stiefel(), (4000, 4, 2))
    np.testing.assert_allclose(stack.mean(axis=0), 0, atol=4 * 0.5 / np.sqrt(4000))
    np.testing.assert_allclose((stack**2).mean(axis=0), 0.25, atol=4 * 0.25 / np.sqrt(4000))


@pytest.mark.slow_except("Stiefel")
@pytest.mark.parametrize(
    "manifold",
    [Stiefel(solver=DualAscent()), SpectralSphere(), EmbeddingRows(2.0, solver=BarzilaiBorwein())],
    ids=name,
)
def test_missing_dual_is_a_cold_start(rng, manifold):
    manifold = dataclasses.replace(manifold, step_norm=Spectral())
    point, grad = point_of(manifold, (6, 4)), normal(rng, 6, 4)
    dual = manifold.init_dual(point.shape)
    found, wanted = ask(
        lambda p, g: [manifold.steepest(p, g, *x) for x in ((), (dual,))], point, grad
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
