"""Minimisation to convergence: known optima, derivatives, batches and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg

from manifoldmuon.manifolds import (
    Euclidean,
    Grassmann,
    Hypersphere,
    Orthogonal,
    Stiefel,
    retractions,
)
from manifoldmuon.minimize import LBFGS, Auto, Reason, TrustRegion, minimize
from manifoldmuon.optim import manifold_muon, project_tangent

METHODS = [LBFGS(), TrustRegion()]
WEIGHTS = np.array([1.0, 2.0])
UNIT = np.eye(3)[0]


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def symmetric(seed, *shape):
    matrix = np.random.default_rng(seed).standard_normal(shape)
    return (matrix + np.swapaxes(matrix, -1, -2)) / 2


def orthonormal(seed, *shape):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal(shape))[0]


def brockett(x, a, scale=1.0):
    return -scale * jnp.sum(x * (a @ x) * WEIGHTS)


def rayleigh(x, a):
    return jnp.einsum("...i,...ij,...j->", x, a, x)


def name_of(value):
    return type(value).__name__


def converge(*arguments, reason=Reason.GRADIENT, **options):
    """Minimise, and check the reason to stop."""
    found = minimize(*arguments, **options)
    assert Reason(int(found.reason)) is reason
    return found


def gradient_norms(*arguments):
    """Minimise by a trust region; return the result and the gradient norms of its steps."""
    norms, record = [], lambda steps, value, norm: norms.append(float(norm))
    found = converge(*arguments, method=TrustRegion(), callback=record)
    jax.effects_barrier()
    return found, norms


@pytest.mark.slow_except("LBFGS")
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_methods_find_leading_eigenvectors(method):
    a, start = symmetric(1, 8, 8), orthonormal(2, 8, 2)
    found = converge(brockett, Stiefel(), start, (a,), method=method, tolerance=1e-10)
    assert float(found.gradient_norm) <= 1e-10
    assert abs(float(found.value) + np.linalg.eigvalsh(a)[-2:] @ WEIGHTS) < 1e-12
    np.testing.assert_allclose(found.point.T @ found.point, np.eye(2), atol=1e-13)
    assert int(found.evaluations) >= int(found.steps) > 0


@pytest.mark.slow
def test_trust_region_converges_quadratically():
    a, manifold = symmetric(3, 6, 6), Stiefel(retraction=retractions.QR())
    found, norms = gradient_norms(brockett, manifold, orthonormal(4, 6, 2), (a,))
    assert abs(float(found.value) + np.linalg.eigvalsh(a)[-2:] @ WEIGHTS) < 1e-12
    assert norms[-1] < 10 * norms[-2] ** 1.8 + 1e-13


@pytest.mark.slow
def test_trust_region_stops_at_rounding():
    """Rounding errors of a normal part much larger than the gradient once cost 1000 products."""
    rng = np.random.default_rng(31)
    a, b = rng.standard_normal((33, 30)), rng.standard_normal((33, 3))
    cost = lambda x: jnp.sum((a @ x - b) ** 2) / 30  # noqa: E731
    found, norms = gradient_norms(cost, Stiefel(), orthonormal(32, 30, 3))
    assert int(found.evaluations) < 300
    small = [norm for norm in norms if norm < 1e-3]
    assert small == sorted(small, reverse=True)


@pytest.mark.slow
def test_momentum_converges_with_projected_gradients():
    """ICA; by default, normal parts of old gradients in the momentum prevent convergence."""
    x = np.random.default_rng(33).laplace(size=(300, 6))
    x = np.linalg.svd(x - x.mean(0), full_matrices=False)[0] * 300**0.5
    manifold, start = Orthogonal(), orthonormal(34, 6, 6)

    gradient = jax.grad(lambda q: jnp.sum(jnp.mean(jnp.log(jnp.cosh(x @ q)), axis=0)))

    def last(clip):
        rate = optax.linear_schedule(0.1, 0.0, 400)
        tx = manifold_muon(rate, manifold, clip=clip, track_gap=False)

        def step(_, carry):
            q, state = carry
            updates, state = tx.update(gradient(q), state, q)
            return optax.apply_updates(q, updates), state

        q, _ = jax.lax.fori_loop(0, 400, step, (jnp.asarray(start), tx.init(jnp.asarray(start))))
        return float(jnp.linalg.norm(manifold.project_tangent(q, gradient(q))))

    assert last(project_tangent(manifold)) < 1e-3 < 1e-2 < last(None)


class Straight(retractions.Retraction):
    """Add the tangent vector without retracting."""

    order = 1

    def retract(self, point, vector):
        return point + vector


@pytest.mark.slow_except("inflection", "unbounded")
@pytest.mark.parametrize(
    ("cost", "manifold", "start", "value"),
    [
        (lambda x: x[0], Hypersphere(), np.eye(3)[1], -1),
        (lambda x: x[0] * x[1], Hypersphere(), np.eye(3)[1], -0.5),
        (lambda x: jnp.sum(x[3:]), Stiefel(), np.eye(6, 2), -np.sqrt(6)),
        (lambda x: jnp.sum(jnp.sin(x)), Euclidean(), np.zeros(3), -3),
        (jnp.sum, Euclidean(), np.ones(3), -np.inf),
    ],
    ids=["linear", "bilinear", "entries", "inflection", "unbounded"],
)
def test_trust_region_leaves_points_of_zero_curvature(cost, manifold, start, value):
    reason = Reason.GRADIENT if np.isfinite(value) else Reason.MAX_STEPS
    found = converge(cost, manifold, start, method=TrustRegion(), reason=reason)
    if reason is Reason.GRADIENT:
        np.testing.assert_allclose(found.value, value, rtol=1e-9)


def test_leaving_the_manifold_is_reported():
    a, start = symmetric(29, 6, 6), orthonormal(30, 6, 2)
    off, options = Stiefel(retraction=Straight()), {"method": LBFGS(), "max_steps": 20}
    found = converge(brockett, off, start, (a,), reason=Reason.OFF_SET, **options)
    assert np.linalg.norm(found.point.T @ found.point - np.eye(2)) > 1e-5
    assert int(found.steps) > 0


@pytest.mark.slow
def test_product_of_manifolds_gives_truncated_svd():
    a = np.random.default_rng(5).standard_normal((9, 6))
    geometry = {"u": Stiefel(), "s": Euclidean(), "v": Stiefel().transposed()}
    start = {"u": orthonormal(6, 9, 2), "s": np.ones(2), "v": orthonormal(7, 6, 2).T}
    cost = lambda x: jnp.sum((a - (x["u"] * x["s"]) @ x["v"]) ** 2)  # noqa: E731
    found = minimize(cost, geometry, start)
    values = np.linalg.svd(a, compute_uv=False)
    assert abs(float(found.value) - np.sum(values[2:] ** 2)) < 1e-10
    np.testing.assert_allclose(np.sort(np.abs(found.point["s"]))[::-1], values[:2], atol=1e-8)


@pytest.mark.slow
def test_leading_axes_are_a_product_manifold():
    a = symmetric(8, 3, 5, 5)
    start = Hypersphere().project(jnp.asarray(np.random.default_rng(9).standard_normal((3, 5))))
    found = minimize(rayleigh, Hypersphere(), start, (a,))
    assert abs(float(found.value) - np.linalg.eigvalsh(a)[:, 0].sum()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_vmap_of_starts_inside_jit(method):
    a = symmetric(10, 6, 6)
    starts = Hypersphere().project(jnp.asarray(np.random.default_rng(11).standard_normal((4, 6))))

    solve = lambda x: minimize(rayleigh, Hypersphere(), x, (a,), method=method)  # noqa: E731
    found, (values, vectors) = jax.jit(jax.vmap(solve))(starts), np.linalg.eigh(a)
    assert found.reason.tolist() == [Reason.GRADIENT] * 4
    np.testing.assert_allclose(found.value, values[0], atol=1e-12)
    np.testing.assert_allclose(np.abs(found.point @ vectors[:, 0]), 1, atol=1e-12)


def subspace(x, a):
    return -jnp.sum(x * (a @ x))


CASES = {
    "Stiefel": (brockett, Stiefel(), orthonormal(12, 6, 2), lambda x: x * jnp.sign(x[:1])),
    "sphere": (rayleigh, Hypersphere(), orthonormal(13, 6, 1)[:, 0], lambda x: x * x),
    "Grassmann": (subspace, Grassmann(), orthonormal(14, 6, 2), lambda x: x @ x.T),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_minimum_match_finite_differences(name):
    f, manifold, start, observe = CASES[name]
    solve = lambda a: observe(minimize(f, manifold, start, (a,), tolerance=1e-12).point)  # noqa: E731
    a, change = symmetric(15, 6, 6), symmetric(16, 6, 6)
    found, moved = jax.jvp(solve, (a,), (change,))
    near, far = (solve(a + h * change) - solve(a - h * change) for h in (3e-4, 6e-4))
    np.testing.assert_allclose(moved, (8 * near - far) / 36e-4, atol=1e-8)
    weights = np.random.default_rng(17).standard_normal(found.shape)
    gradient = jax.grad(lambda a: jnp.sum(weights * solve(a)))(a)
    np.testing.assert_allclose(jnp.sum(gradient * change), jnp.sum(weights * moved), rtol=1e-9)


@pytest.mark.slow
def test_derivatives_of_captured_values():
    a, start = jnp.asarray(symmetric(18, 5, 5)), orthonormal(19, 5, 1)[:, 0]

    def least(scale):
        return minimize(lambda x: rayleigh(x, scale * a), Hypersphere(), start).value

    found = [jax.grad(least)(2.0), jax.jit(jax.grad(least))(2.0)]
    np.testing.assert_allclose(found, np.linalg.eigvalsh(a)[0], atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_stops_by_max_steps(method):
    a, start = symmetric(20, 6, 6), orthonormal(21, 6, 1)[:, 0]
    few, none = (
        minimize(rayleigh, Hypersphere(), start, (a,), method=method, max_steps=n) for n in (3, 0)
    )
    assert (int(few.steps), Reason(int(few.reason))) == (3, Reason.MAX_STEPS)
    assert int(none.steps) == 0
    np.testing.assert_array_equal(none.point, start)


@pytest.mark.slow
def test_unreachable_tolerance_is_reported():
    a = np.float32(1e6 * symmetric(24, 8, 8))  # gradients of 1e6, rounded to 1
    start = np.float32(orthonormal(25, 8, 2))
    found = minimize(brockett, Stiefel(), start, (a,), tolerance=1e-6)
    # With slopes near rounding, the search may continue to the last step, as in JAX 0.8.1.
    assert Reason(int(found.reason)) in (Reason.NO_PROGRESS, Reason.MAX_STEPS)
    optimum = -np.linalg.eigvalsh(np.float64(a))[-2:] @ WEIGHTS
    np.testing.assert_allclose(found.value, optimum, rtol=1e-5)


def test_nan_cost_of_long_steps_is_avoided():
    """Steps with a NaN cost are shortened."""
    cost = lambda x: jnp.sum(x**2 - jnp.log(x))  # noqa: E731
    found = minimize(cost, Euclidean(), np.array([1e-3, 5.0]), tolerance=1e-9)
    np.testing.assert_allclose(found.point, np.sqrt(0.5), atol=1e-9)


@pytest.mark.slow
def test_invalid_starts_inside_jit_are_reported():
    starts = jnp.outer(jnp.array([1.0, 2.0, -1.0]), UNIT)

    def run(start):
        cost, method = lambda x: jnp.log(x[0]) + x[1], LBFGS()
        return minimize(cost, Hypersphere(), start, method=method, max_steps=2)

    found = jax.jit(jax.vmap(run))(starts)
    assert found.reason.tolist() == [Reason.MAX_STEPS, Reason.OFF_SET, Reason.NOT_FINITE]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_cost_scaled_by_power_of_two_keeps_minimum(method):
    """Bit for bit: gradients of 1e-20 do not count as small; squares of 1e20 do not overflow."""
    a, start = np.float32(symmetric(22, 8, 8)), np.float32(orthonormal(23, 8, 2))
    found, *others = (
        converge(brockett, Stiefel(), start, (a, c), method=method)
        for c in np.asarray([1, 2.0**-66, 2.0**66], np.float32)
    )
    assert found.point.dtype == jnp.float32
    assert found.steps > 1
    for other in others:
        np.testing.assert_array_equal(other.point, found.point)


@pytest.mark.slow
def test_small_point_clouds_register_in_float32():
    """Coordinates are of size 1e-3, so the gradient is below 1e-4 at every start."""
    rng = np.random.default_rng(3)
    turn, skew = orthonormal(4, 3, 3), rng.standard_normal((3, 3))
    start = scipy.linalg.expm(0.5 * (skew - skew.T)) @ turn
    cloud = 1e-3 * rng.standard_normal((20, 3))
    pair = np.float32(cloud), np.float32(cloud @ turn.T)
    cost = lambda q, x, y: jnp.sum((x @ q.T - y) ** 2)  # noqa: E731
    found = minimize(cost, Orthogonal(), np.float32(start), pair)
    # The gradient shrinks to 1e-4 of the first; the error to that times the cloud's condition.
    close = 1e-4 * np.linalg.cond(cloud) ** 2 * np.linalg.norm(start - turn)
    np.testing.assert_allclose(found.point, turn, atol=close)


def test_start_at_minimum_takes_no_step():
    start = np.float32(UNIT)
    assert converge(lambda x: 3 + jnp.sum((x - start) ** 2), Hypersphere(), start).steps == 0


@pytest.mark.slow
def test_derivative_of_nonisolated_minimum_has_least_norm():
    """The trace is invariant to rotations of the columns: subspaces move, columns do not rotate."""
    a, start, change = symmetric(1, 5, 5), orthonormal(2, 5, 2), symmetric(7, 5, 5)
    point = lambda a: minimize(subspace, Stiefel(), start, (a,)).point  # noqa: E731
    x, moved = map(np.asarray, jax.jvp(point, (a,), (change,)))

    def projector(a):
        vectors = np.linalg.eigh(a)[1][:, -2:]
        return vectors @ vectors.T

    h = 1e-6
    wanted = (projector(a + h * change) - projector(a - h * change)) / (2 * h)
    np.testing.assert_allclose(moved @ x.T + x @ moved.T, wanted, atol=1e-6)
    np.testing.assert_allclose(x.T @ moved, 0, atol=1e-7)


def least_squares(x, a, b):
    return jnp.sum((a @ x - b) ** 2)


@pytest.mark.parametrize("scale", [1.0, 1e6], ids=["unit", "large"])
@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["zero", "nonzero"])
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_float32_least_squares_reaches_rounding(method, noise, scale):
    """A gradient of 1e-4 of the first leaves errors of 1e-3; large x, small a: no step at all."""
    rng = np.random.default_rng(40)
    a, x = rng.standard_normal((60, 10)), rng.standard_normal(10)
    b = a @ x + noise * rng.standard_normal(60)
    start = np.float32(scale * (x + 0.3 * rng.standard_normal(10)))
    a, b = np.float32(a / scale), np.float32(b)
    best, *_ = np.linalg.lstsq(np.float64(a), np.float64(b), rcond=None)
    # A trust region as large as the point, which is far from 1.
    method = TrustRegion(radius=scale) if isinstance(method, TrustRegion) else method
    found = converge(least_squares, Euclidean(), start, (a, b), method=method)
    # Rounding of a x - b, times the condition of the normal equations.
    bound = 10 * np.finfo(np.float32).eps * np.linalg.cond(a) ** 2
    assert np.linalg.norm(found.point - best) <= bound * np.linalg.norm(best)


@pytest.mark.slow
def test_float32_procrustes_with_zero_residual_is_exact_to_rounding():
    a, turn, start = np.random.default_rng(41).standard_normal((40, 20)), *orthonormal(42, 2, 20, 3)
    data = np.float32(a), np.float32(a @ turn)
    found = converge(least_squares, Stiefel(), np.float32(start), data)
    np.testing.assert_allclose(found.point, turn, atol=10 * 1.2e-7 * np.linalg.cond(a) ** 2)


def ill_conditioned(x, a):
    return jnp.sum(x * (a @ x)) / 2 - jnp.sum(x)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["eager", "jit"])
def test_default_turns_to_trust_region_after_its_steps(inside):
    a, steps = np.diag(np.geomspace(1, 1e5, 40)), []
    count = lambda step, value, norm: steps.append(int(step))  # noqa: E731
    solve = functools.partial(minimize, ill_conditioned, Euclidean())
    auto = functools.partial(solve, method=Auto(steps=20), callback=count)
    found = (jax.jit(auto) if inside else auto)(np.zeros(40), (a,))
    alone = solve(np.zeros(40), (a,), method=LBFGS())
    jax.effects_barrier()
    assert Reason(int(found.reason)) is Reason.GRADIENT
    assert 20 < int(found.steps) < int(alone.steps) / 2
    assert sorted(steps) == list(range(int(found.steps) + 1))
    np.testing.assert_allclose(found.point, 1 / np.diag(a), rtol=1e-8)


@pytest.mark.slow
def test_default_compiles_trust_region_only_where_slow(monkeypatch):
    monkeypatch.setattr(TrustRegion, "run", None)  # tracing it would fail
    converge(rayleigh, Hypersphere(), UNIT + 0.0, (symmetric(43, 3, 3),))


@pytest.mark.slow
def test_default_without_second_derivative_continues_with_lbfgs():
    a = np.diag(np.geomspace(1, 1e4, 30))

    @jax.custom_vjp
    def cost(x):
        return ill_conditioned(x, a)

    def product(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: a @ np.asarray(x), shape, x)

    cost.defvjp(lambda x: (cost(x), x), lambda x, g: (g * (product(x) - 1),))
    with jax.enable_x64(False):  # a callback's own thread knows no float64
        found = converge(cost, Euclidean(), np.zeros(30, np.float32), method=Auto(steps=20))
    assert int(found.steps) > 20


@pytest.mark.slow
def test_derivative_of_minimum_passes_through_both_methods():
    a = jnp.asarray(np.geomspace(1, 1e3, 30))

    def last(a):
        method = Auto(steps=5)
        cost = lambda x, a: jnp.sum(a * x * x) / 2 - jnp.sum(x)  # noqa: E731
        return minimize(cost, Euclidean(), jnp.zeros(30), (a,), method=method).point[-1]

    np.testing.assert_allclose(jax.grad(last)(a)[-1], -1e-6, rtol=1e-6)  # of 1 / a


@pytest.mark.slow
def test_result_prints_one_line_without_arrays():
    a, start = symmetric(44, 6, 6), orthonormal(45, 3, 6, 1)[..., 0]
    found, shown = minimize(rayleigh, Hypersphere(), start, (a,)), []
    size = f"value {found.value:.6g}, gradient norm {found.gradient_norm:.3g}"
    assert str(found) == repr(found) == f"Result(GRADIENT after {found.steps} steps: {size})"

    def run(x):
        result = minimize(rayleigh, Hypersphere(), x, (a,), max_steps=1)
        shown.append(repr(result))
        return result

    many = jax.jit(jax.vmap(run))(start)
    assert shown == ["Result(traced, with values of shape ())"]
    assert repr(many).startswith("Result(3 MAX_STEPS after 1 to 1 steps: value ")
    assert "\n" not in repr(many)
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(run, start[0]))


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_wrong_gradient_cannot_raise_the_cost_beyond_rounding(method):
    """Each step may rise by what rounding explains; a thousand such steps may not add up."""
    weights = jnp.array([3.0, 2.0, 1.0, 0.5])

    @jax.custom_jvp
    def cost(x):
        return -jnp.sum(weights * x**2)

    cost.defjvp(lambda x, e: (cost(*x), 2 * jnp.sum(weights * x[0] * e[0])))  # the sign is wrong
    start = Hypersphere().random_point(jax.random.key(24), (4,), jnp.float32)
    result = minimize(cost, Hypersphere(), start, method=method)
    assert result.reason == Reason.NO_PROGRESS
    assert result.value - cost(start) < 2000 * jnp.finfo(jnp.float32).eps * 3
