"""Iteration counts: fixed by default, early stopping with a tolerance, with and without jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.manifolds.solvers._dual_ascent import iterate
from manifoldmuon.norms import Spectral
from studies.stiefel_problems import stiefel_problem

NORM = Spectral()


def halve(k, state):
    value, count = state
    return (value / 2, count + 1), value


def run(value, tolerance):
    return iterate(halve, (value, jnp.int32(0)), 20, tolerance)[1]


@pytest.mark.parametrize("compile", [jax.jit, lambda f, **_: f], ids=["jit", "eager"])
def test_tolerance_stops_loop_and_zero_does_not(compile):
    value = jnp.float32([1.0, 0.25])
    count = compile(run, static_argnums=1)
    assert count(value, 0.1) == 5  # errors 1, 1/2, 1/4, 1/8, 1/16: the larger value decides
    assert count(value, 0.0) == 20


def test_nan_never_stops_loop():
    assert run(jnp.float32([jnp.nan, 0.0]), 0.1) == 20


def test_early_stopped_dual_ascent_matches_full_run():
    solver, early = DualAscent(steps=200), DualAscent(steps=200, tolerance=3e-3)
    point, grad = (jnp.float32(x) for x in stiefel_problem("gaussian", 30, 6))
    dual = solver.init(point.shape)
    full = jax.jit(solver.solve, static_argnums=0)(NORM, point, grad, dual)
    compiled, eager = (
        jax.jit(early.solve, static_argnums=0)(NORM, point, grad, dual),
        early.solve(NORM, point, grad, dual),
    )
    np.testing.assert_allclose(compiled.direction, eager.direction, atol=1e-5)
    np.testing.assert_allclose(compiled.direction, full.direction, atol=1e-2)
    assert not np.array_equal(compiled.direction, full.direction)
    assert compiled.gap < 1e-3


def test_dual_ascent_keeps_dtype_under_x64():
    """Under jax_enable_x64 the step count must not change the dtype of the state."""
    solver = DualAscent(steps=3)
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            point, grad = (jnp.asarray(x, dtype) for x in stiefel_problem("gaussian", 12, 5))
            answer = jax.jit(solver.solve, static_argnums=0)(
                NORM, point, grad, solver.init(point.shape)
            )
            assert answer.direction.dtype == dtype
            assert np.isfinite(answer.direction).all()
