"""Fixed counts under jit, an early stop outside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from manifoldmuon.manifolds.solvers import FixedPoint
from manifoldmuon.manifolds.solvers._iterate import iterate


def halve(k, state):
    value, count = state
    return (value / 2, count + 1), value


def run(value, tolerance):
    return iterate(halve, (value, jnp.int32(0)), 20, tolerance)[1]


def test_concrete_problems_stop_early_and_traced_ones_do_not():
    value = jnp.float32([1.0, 0.25])
    assert run(value, 0.1) == 5  # errors 1, 1/2, 1/4, 1/8, 1/16: the worse of the two decides
    assert run(value, 0.0) == 20
    assert jax.jit(run, static_argnums=1)(value, 0.1) == 20


def test_a_nan_never_counts_as_finished():
    assert run(jnp.float32([jnp.nan, 0.0]), 0.1) == 20


def test_a_solver_stops_early_with_the_answer_of_its_full_budget():
    rng = np.random.default_rng(0)
    point = jnp.float32(np.linalg.qr(rng.standard_normal((30, 6)))[0])
    grad = jnp.float32(rng.standard_normal((30, 6)))
    solver = FixedPoint(steps=60, tolerance=1e-3)
    dual = solver.init_dual(point.shape)
    full = jax.jit(functools.partial(solver.solve))(point, grad, dual)
    early = solver.solve(point, grad, dual)
    np.testing.assert_allclose(early.direction, full.direction, atol=1e-2)
    assert early.gap < 1e-3
