"""Iteration counts: fixed by default, early stopping with a tolerance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import msign
from manifoldmuon.manifolds.solvers import DualAscent
from manifoldmuon.manifolds.solvers._dual_ascent import finish, stack, unit_of
from manifoldmuon.manifolds.solvers._parts import split
from manifoldmuon.norms import Spectral
from tests.oracles.stiefel_problems import stiefel_problem

NORM = Spectral()


def test_early_stopped_dual_ascent_matches_full_run():
    solver, early = DualAscent(steps=200), DualAscent(steps=200, tolerance=3e-3)
    point, grad = (jnp.float32(x) for x in stiefel_problem("gaussian", 30, 6))
    dual = solver.init(point.shape)
    full = jax.jit(solver.solve, static_argnums=0)(NORM, point, grad, dual)
    compiled = jax.jit(early.solve, static_argnums=0)(NORM, point, grad, dual)
    np.testing.assert_allclose(compiled.direction, full.direction, atol=1e-2)
    assert not np.array_equal(compiled.direction, full.direction)
    assert compiled.gap < 1e-3


def test_dual_ascent_keeps_dtype_under_x64():
    """Under jax_enable_x64 the step count must not change the dtype of the state."""
    solver = DualAscent(steps=3)
    with jax.enable_x64(True):
        for dtype in (jnp.float32, jnp.float64):
            point = jax.ShapeDtypeStruct((12, 5), dtype)
            solve = functools.partial(solver.solve, NORM)
            answer = jax.eval_shape(solve, point, point, solver.init(point.shape))
            assert answer.direction.dtype == dtype


@pytest.mark.slow
def test_directions_of_iterations_are_not_longer_than_one():
    """The SVD in float32 that measures a direction rounds, too; float64 finds what it misses."""
    point, grad = (jnp.float32(x) for x in stiefel_problem("gaussian", 256, 128))
    parts = split(point, grad)
    exact = msign(stack(parts, jnp.zeros((128, 128)), unit_of(parts)))
    found = jax.jit(finish)(parts, 1.5 * exact, jnp.float32(1e4), ())
    assert np.linalg.norm(np.asarray(found.direction, np.float64), 2) <= 1
