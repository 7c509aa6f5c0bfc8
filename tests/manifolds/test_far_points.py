"""Steps from matrices far from orthonormal: random, ill-conditioned, of any scale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import SVD
from manifoldmuon.manifolds import Grassmann, Orthogonal, Stiefel, _polar_factors
from manifoldmuon.manifolds._polar_factors import project_if_far
from manifoldmuon.manifolds.retractions import QR, Analytic, Cayley, Exponential, Polar
from manifoldmuon.manifolds.solvers import (
    ClosedForm,
    DualAscent,
    ProjectedPolar,
    Resolvents,
    SkewPolar,
)
from manifoldmuon.testing import check_inside_shard_map

SOLVERS = {
    "ACCURATE": ClosedForm(),
    "FAST": ProjectedPolar(),
    "SkewPolar by svd": SkewPolar(SVD()),
    "Resolvents": Resolvents(),
    "DualAscent": DualAscent(steps=10),
}
RETRACTIONS = (Polar(), QR(), Analytic(), Cayley(), Exponential())
CASES: dict[str, tuple[Any, tuple[int, int]]] = {
    **{name: (Stiefel(solver=solver), (16, 6)) for name, solver in SOLVERS.items()},
    **{repr(how): (Stiefel(retraction=how), (16, 6)) for how in RETRACTIONS},
    "wide, scaled": (Stiefel(3.0), (5, 12)),
    "condition 11 and wide": (Stiefel(), (4, 16)),
    "orthogonal": (Orthogonal(), (8, 8)),
    "orthogonal, FAST": (Orthogonal(solver=ProjectedPolar()), (8, 8)),
    "column": (Stiefel(), (7, 1)),
    "grassmann": (Grassmann(), (12, 5)),
}


def polar(x: jax.Array | np.ndarray) -> np.ndarray:
    left, _, right = np.linalg.svd(np.float64(x), full_matrices=False)
    return left @ right


def full_rank(shape: tuple[int, int]) -> np.ndarray:
    """Return a stack of full-rank matrices."""
    rng = np.random.default_rng(5)
    k = min(shape)
    left, right = (polar(rng.standard_normal((side, k))) for side in shape)
    found = [rng.standard_normal(shape) * c for c in (1e-6, shape[1] ** -0.5, 1, 30, 1e6)]
    found.append(rng.standard_normal(shape) * (2 / shape[1]) ** 0.5)
    found += [left * np.geomspace(1, 1 / c, k) @ right.T for c in (1e1, 1e2, 1e3, 1e4)]
    found += [left * s @ right.T for s in (0.9, 1.004, 1.01, 1.5)]
    return np.asarray(found, np.float32)


def step(manifold, points, grads, rate):
    answer = manifold.steepest(points, grads, manifold.init_dual(points.shape))
    return answer, manifold.retract(points, -rate * answer.direction)


SHORT = ("ACCURATE", "FAST", "wide, scaled", "grassmann")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in CASES] + [(name, "bfloat16") for name in SHORT],
)
def test_step_ends_within_rate_of_nearest_point(name, dtype):
    """Up to rounding, the direction has norm at most 1 and the step ends within 1.1 rates."""
    manifold, shape = CASES[name]
    points = jnp.asarray(full_rank(shape), dtype)
    grads = jnp.asarray(np.random.default_rng(6).standard_normal(points.shape), dtype)
    rate, scale = 0.02, manifold.norm.scale
    answer, moved = jax.jit(lambda p, g: step(manifold, p, g, rate))(points, grads)
    eps = float(jnp.finfo(dtype).eps)
    for point, direction, after in zip(points, answer.direction, moved, strict=True):
        near = np.linalg.norm(np.float64(point) / scale - polar(point), 2) < 0.005
        size = np.linalg.norm(np.float64(direction), 2) / scale
        # Points this near are not projected first, and FAST is accurate to 0.1 % only.
        assert size <= 1 + (0.005 if near else 0) + 2 * eps + 1e-3
        away = np.linalg.norm(np.float64(after) / scale - polar(point), 2)
        assert away <= 1.1 * rate + 2 * eps + (0.005 if near else 0)
    assert (answer.gap >= 0).all()


@pytest.mark.parametrize("name", ["ACCURATE", "FAST", "wide, scaled", "orthogonal", "grassmann"])
def test_rank_deficient_step_ends_on_the_set(name):
    """The step ends near a polar factor; a NaN stays in its batch element."""
    manifold, shape = CASES[name]
    rng = np.random.default_rng(7)
    thin = np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1]))
    corner = np.zeros(shape)
    corner[-1, 0] = 2.0
    points = np.asarray(
        [np.zeros(shape), np.ones(shape), thin, corner, np.full(shape, np.nan)], np.float32
    )
    grads = rng.standard_normal(points.shape).astype(np.float32)
    answer, moved = jax.jit(lambda p, g: step(manifold, p, g, 0.05))(points, grads)
    assert (jnp.linalg.norm(answer.direction[:4], ord=2, axis=(-2, -1)) < 3.02).all()
    assert (manifold.distance(moved[:4]) < 4e-6).all()
    assert np.isnan(moved[4]).all()
    # The nonzero singular vector moves by the rate, not at random.
    assert abs(moved[3, -1, 0]) > 0.9


@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_step_derivatives_from_far_and_near_points(shape):
    """Compare both modes with differences, with respect to points and gradients."""
    rng = np.random.default_rng(8)
    manifold = Stiefel(solver=SkewPolar(SVD()))
    far, near = rng.standard_normal((2, *shape))
    with jax.enable_x64(True):
        points = jnp.asarray([far, 0.999 * polar(near)])
        grads, turn, weights = (jnp.asarray(rng.standard_normal(points.shape)) for _ in range(3))

        @jax.jit
        def value(t):
            moved = step(manifold, points + t * turn * 1e-1, grads + t * weights, 0.1)[1]
            return jnp.sum(weights * moved)

        h = 1e-6
        difference = (value(jnp.array(h)) - value(jnp.array(-h))) / (2 * h)
        for mode in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(mode(value))(jnp.array(0.0)), difference, rtol=1e-5)
    assert abs(float(difference)) > 1e-2


def test_far_point_does_not_affect_its_batch():
    """In a stack (bit for bit, as the program is the same) and under `vmap`."""
    rng = np.random.default_rng(9)
    near = np.asarray([polar(rng.standard_normal((8, 3))) for _ in range(2)], np.float32)
    far = rng.standard_normal((8, 3)).astype(np.float32)
    grads = rng.standard_normal((3, 8, 3)).astype(np.float32)
    run = jax.jit(lambda p, g: step(Stiefel(), p, g, 0.1)[1])
    mixed, other = np.stack([*near, far]), np.stack([*near, near[0]])
    np.testing.assert_array_equal(run(mixed, grads)[:2], run(other, grads)[:2])
    mapped = jax.jit(jax.vmap(lambda p, g: step(Stiefel(), p, g, 0.1)[1]))
    np.testing.assert_allclose(mapped(mixed, grads), run(mixed, grads), atol=1e-6)


def test_near_points_skip_iterations(monkeypatch):
    """This also holds under `jax.vmap`, which evaluates both branches of conditions."""
    calls: list[int] = []

    def counted(gram):
        jax.debug.callback(lambda _: calls.append(1), gram[..., 0, 0])
        return 15 / 8 * jnp.eye(6) - 10 / 8 * gram + 3 / 8 * gram @ gram

    monkeypatch.setattr(_polar_factors, "polish", counted)
    points = jnp.asarray(full_rank((16, 6))[:4])  # far from orthonormal
    for function in (project_if_far, jax.vmap(project_if_far)):
        near = function(points)
        jax.effects_barrier()
        assert len(calls) >= 4
        calls.clear()
        np.testing.assert_array_equal(function(near), near)
        jax.effects_barrier()
        assert not calls


def test_far_points_inside_shard_map():
    points = full_rank((6, 3))

    def both(point, grad):
        slope = jax.grad(lambda p: jnp.sum(Stiefel().retract(p, grad)))(point)
        return step(Stiefel(), point, grad, 0.1), slope

    with jax.numpy_dtype_promotion("strict"):
        check_inside_shard_map(both, points, points)
