"""Baselines of benchmarks: solvers are feasible and certified; methods obey the laws of msign."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._baselines import ADMM, AlternatingProjection, FixedPoint
from benchmarks._polar_methods import QDWH, GramEigh, InverseRoot
from manifoldmuon.norms import Spectral
from tests.linalg.msign_laws import check_msign
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

pytestmark = pytest.mark.slow

# Largest allowed gap on the gradient families.
BASELINES = {AlternatingProjection(): 0.3, FixedPoint(): 0.05, ADMM(): 0.05}
WARM = pytest.mark.parametrize("kind", [FixedPoint, ADMM])


def problems(shape: tuple[int, int], seed: int = 0):
    pairs = [stiefel_problem(family, *shape, seed) for family in STIEFEL_FAMILIES]
    return tuple(jnp.float32(np.stack(x)) for x in zip(*pairs, strict=True))


def solve(solver, point, grad, dual=None):
    dual = solver.init(point.shape) if dual is None else dual
    return jax.jit(solver.solve, static_argnums=0)(Spectral(), point, grad, dual)


def errors(*problems):
    return np.array([stiefel_errors(*problem) for problem in zip(*problems, strict=True)]).T


@pytest.mark.parametrize("solver", BASELINES, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("shape", [(48, 16), (20, 16)])
def test_directions_are_feasible_and_certified(solver, shape):
    points, grads = problems(shape)
    answer = solve(solver, points, grads)
    true, residuals, norms = errors(points, grads, answer.direction)
    assert residuals.max() < 1e-5
    assert norms.max() < 1 + 1e-5
    assert true.max() < BASELINES[solver]
    assert np.all(answer.gap >= true - 1e-6)
    small = solve(solver, points, grads * 1e-20)
    np.testing.assert_allclose(small.gap, answer.gap, atol=1e-3)
    np.testing.assert_array_equal(solve(solver, points, 0 * grads).direction, 0)


@WARM
def test_iterations_and_warm_starts_reduce_gap(kind):
    few, many = kind(steps=3), kind(steps=100)
    points, grads = problems((20, 16))
    answers = [solve(solver, points, grads) for solver in (few, many)]
    far, near = (errors(points, grads, answer.direction)[0] for answer in answers)
    assert near.max() < far.max() / 2
    nudged = grads + 1e-4 * problems((20, 16), seed=1)[1][:1]
    answers = [solve(few, points, nudged, dual) for dual in (None, answers[1].dual)]
    cold, warm = (errors(points, nudged, answer.direction)[0] for answer in answers)
    assert np.all(warm < cold / 3)


@pytest.mark.parametrize("method", [QDWH(), GramEigh(), InverseRoot()], ids=repr)
def test_methods_satisfy_msign_laws(method):
    check_msign(method, (2, 3, 5), jax.random.key(1), 10.0)
