"""Retractions: closed forms, return to the set, and drift."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.linalg

from manifoldmuon.manifolds import Hypersphere, SpectralBall, SpectralSphere, Stiefel
from manifoldmuon.manifolds.retractions import (
    QR,
    Cayley,
    Clip,
    Exponential,
    Geodesic,
    Polar,
    SoftCap,
)
from tests.compiled import ask, point_of
from tests.tolerances import rounding


def problem(m: int, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return an orthonormal point and a tangent vector of spectral norm 1, in float64."""
    point, vector = np.random.default_rng(seed).normal(size=(2, m, n))
    point = np.linalg.qr(point)[0]
    vector -= point @ (point.T @ vector + vector.T @ point) / 2
    return point, vector / np.linalg.norm(vector, 2)


def deviation(matrix) -> float:
    """Return the largest `|sigma - 1|`, in float64."""
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    return float(np.abs(values - 1).max())


@pytest.mark.parametrize("shape", [(7, 3), (4, 4)], ids=str)
def test_exponential_follows_the_geodesic(shape):
    """The geodesic of the embedded metric, `W'' = -W W'^T W'`, integrated by SciPy."""
    point, vector = problem(*shape)

    def slope(_, state):
        w, v = state.reshape(2, *shape)
        return np.stack([v, -w @ (v.T @ v)]).ravel()

    start = np.stack([point, vector]).ravel()
    path = scipy.integrate.solve_ivp(slope, (0, 1), start, rtol=1e-11, atol=1e-12)
    with jax.enable_x64(True):
        moved = ask(Exponential().retract, point, vector)
    np.testing.assert_allclose(moved, path.y[: point.size, -1].reshape(shape), atol=1e-9)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.1, 1.0, 4.0])
def test_polar_is_nearest_point(size):
    """Errors are about 1e-7 for ordinary steps, eps times the condition number for longer steps."""
    for seed in range(3):
        point, vector = problem(24, 12, seed)
        moved = polar(np.float32(point), np.float32(size * vector))
        tolerance = 5e-7 if size <= 1 else 4e-6
        expected = scipy.linalg.polar(point + size * vector)[0]
        np.testing.assert_allclose(moved, expected, atol=tolerance)
        assert deviation(moved) < tolerance


polar = jax.jit(Polar().retract)


@pytest.mark.parametrize("size", [20.0, 1e3, 1e15, 1e30])
def test_polar_shortens_long_steps(size):
    """Only the length of the step changes; squares that overflow stop it."""
    point, vector = map(np.float32, problem(24, 12))
    moved = np.float64(polar(point, np.float32(size) * vector))
    assert deviation(moved) < 2e-5  # eps times the squared length, 10
    lengths = np.linspace(0, 10, 1001) / np.linalg.norm(vector, 2)
    distances = [np.linalg.norm(scipy.linalg.polar(point + t * vector)[0] - moved) for t in lengths]
    assert min(distances) < 0.02
    assert (np.argmin(distances) > 300) == (size < 1e18)


def test_polar_of_wide_matrices_matches_transpose():
    point, vector = map(np.float32, problem(9, 4))
    retract = Polar().retract

    def both(w, v):
        return jax.jvp(retract, (w, v), (v, w)), jax.jvp(retract, (w.T, v.T), (v.T, w.T))

    (moved, slope), wide = ask(both, point, vector)
    np.testing.assert_allclose(wide[0].T, moved, atol=1e-6)
    np.testing.assert_allclose(wide[1].T, slope, atol=1e-5)


@pytest.mark.parametrize("retraction", [Polar(), QR(), Cayley(), Exponential()], ids=str)
def test_only_polar_and_qr_restore_points(retraction):
    point, vector = problem(8, 3)
    moved = ask(retraction.retract, np.float32(1.001 * point), np.float32(0.01 * vector))
    assert (deviation(moved) < 1e-6) == (retraction in (Polar(), QR()))


def test_cayley_matches_full_system():
    """The 2n x 2n system matches the equivalent m x m system."""
    w, v = problem(6, 2)
    p = np.eye(6) - w @ w.T / 2
    k = p @ v @ w.T - w @ v.T @ p
    expected = np.linalg.solve(np.eye(6) - k / 2, (np.eye(6) + k / 2) @ w)
    np.testing.assert_allclose(ask(Cayley().retract, *map(np.float32, (w, v))), expected, atol=1e-6)


def test_qr_has_a_positive_diagonal():
    """A step of length zero must not move, regardless of the decomposition's signs."""
    w = np.float32(problem(6, 3)[0] * [1, -1, -1])
    np.testing.assert_allclose(ask(QR().retract, w, np.zeros_like(w)), w, atol=1e-6)


def test_great_circles_of_any_length():
    """Accurate to rounding with and without series for sines; derivatives at zero are exact."""
    with jax.enable_x64(True):
        point, ahead = jnp.eye(5)[0], np.eye(5)[1]
        lengths = np.concatenate([np.zeros(1), np.geomspace(1e-12, 3, 400)])
        moved = functools.partial(Geodesic().retract, point)
        found = ask(jax.vmap(moved), lengths[:, None] * ahead)
        np.testing.assert_allclose(found[:, 1], np.sin(lengths), rtol=4e-16)
        np.testing.assert_allclose(found[:, 0], np.cos(lengths), rtol=4e-16, atol=1e-16)
        slope, curvature = (ask(d(moved), np.zeros(5)) for d in (jax.jacobian, jax.hessian))
        np.testing.assert_array_equal(slope, np.eye(5))
        np.testing.assert_array_equal(curvature[0], -np.eye(5))
        along = lambda length: moved(length * ahead)[:2]  # noqa: E731
        found = ask(jax.vmap(jax.jacobian(along)), lengths[1:])
        wanted = np.stack([-np.sin(lengths[1:]), np.cos(lengths[1:])], axis=1)
        np.testing.assert_allclose(found, wanted, rtol=1e-14, atol=1e-15)


@pytest.mark.slow_except("Hypersphere(scale=3.0)-(50,)")
@pytest.mark.parametrize(
    ("manifold", "shape"), [(Stiefel(), (64, 10)), (Hypersphere(3.0), (50,))], ids=str
)
def test_no_drift_over_three_thousand_steps(manifold, shape):
    def step(carry, key):
        point, worst = carry
        vector = manifold.project_tangent(point, jax.random.normal(key, shape))
        point = manifold.retract(point, 0.05 * vector / jnp.linalg.norm(vector))
        return (point, jnp.maximum(worst, manifold.distance(point))), None

    point, keys = point_of(manifold, shape), jax.random.split(jax.random.key(1), 3000)
    last, worst = ask(lambda point: jax.lax.scan(step, (point, 0.0), keys)[0], point)
    assert worst < 1e-6
    assert np.linalg.norm(last - point) > 0.5  # the walk moved


@pytest.mark.parametrize("low", [1 / 3, 1 / 1.1])
@pytest.mark.parametrize("least", [1e-2, 1e-4, 1e-5, 0.0])
def test_clip_lower_edge_near_singular(least, low):
    """The singular value near zero grows as far as possible; the others are clipped as usual."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 2.0, (20, 16))
    values[:, 0] = least
    left, right = (np.linalg.qr(rng.normal(size=(20, 16, 16)))[0] for _ in range(2))
    given = np.float32(left * values[:, None] @ right)
    clipped = ask(lambda x: Clip().clip(x, low, 1 / low), given)
    found = np.linalg.svd(np.float64(clipped), compute_uv=False)
    wanted = -np.sort(-np.clip(values, low, 1 / low))
    np.testing.assert_allclose(found[:, :-1], wanted[:, :-1], rtol=1e-4)
    assert (found[:, -1] <= low * 1.001).all()
    assert (found[:, -1] >= min(30 * least, 0.9 * low)).all()


def capped(values: np.ndarray, excess: float) -> np.ndarray:
    """Apply the published cubics, with the coefficient from the roots of its quartic."""
    k = 1 + excess
    roots = np.roots([-(k**9), 3 * k**7, -3 * k**5, 0, k - 1])
    a = min(root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0)
    once = values - a * values**3
    return once + a * once**3


@pytest.mark.parametrize("excess", [1e-3, 0.02, 0.25])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_soft_cap_matches_publication(excess, shape):
    """For a step with equal singular values, the bound on its norm is exact up to 0.5 %."""
    rng = np.random.default_rng(0)
    left, _, right = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.linspace(1.0, 0.1, 8)
    point, vector = (2 * left * v @ right for v in (values, np.full(8, excess)))
    ball = SpectralBall(2.0, retraction=SoftCap())
    with jax.enable_x64(True):
        moved = ask(ball.retract, point, vector)
    wanted = [2 * left * capped(values + excess, e) @ right for e in (excess, 1.006 * excess)]
    found = np.linalg.svd(moved, compute_uv=False)
    assert found[0] <= 2
    assert np.all(np.abs(moved - wanted[0]) <= np.max(np.abs(wanted[1] - wanted[0])) + 1e-12)


@pytest.mark.parametrize("excess", [0.0, 1e-6, 0.1, 1.0, 30.0])
def test_soft_cap_holds_for_any_step_length(excess):
    rng = np.random.default_rng(0)
    ball = SpectralBall(retraction=SoftCap())
    point = ask(ball.project, 2 * rng.standard_normal((4, 20, 12)).astype(np.float32))
    vector = rng.standard_normal(point.shape)
    vector = excess * vector / np.linalg.norm(vector, 2, axis=(-2, -1))[:, None, None]
    moved = np.float64(_softly(point, np.float32(vector)))
    assert np.linalg.norm(moved, 2, axis=(-2, -1)).max() <= 1 + 2e-6
    inside = np.linalg.norm(moved - point, 2, axis=(-2, -1))
    # The sum of the step and the cap's reduction.
    assert inside.max() <= 2.1 * excess + rounding(4, 20)


_softly = jax.jit(SpectralBall(retraction=SoftCap()).retract)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_spectral_sphere_retraction_at_any_scale(scale):
    sphere = SpectralSphere(scale)
    step = np.float32(0.1 * scale * np.random.default_rng(9).standard_normal((6, 4)))
    moved = np.float64(ask(sphere.retract, point_of(sphere, (6, 4)), step))
    np.testing.assert_allclose(np.linalg.norm(moved, 2) / scale, 1, rtol=1e-5)
