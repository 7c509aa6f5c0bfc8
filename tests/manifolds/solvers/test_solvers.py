"""All solvers of the Stiefel manifold: feasible directions with valid gaps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import Precision

from manifoldmuon.manifolds.solvers import (
    ClosedForm,
    DualAscent,
    ProjectedPolar,
    Resolvents,
    SkewPolar,
)
from manifoldmuon.norms import Spectral
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

# Solvers with their largest true gap on the four families.
SOLVERS = {
    "skew lift": (SkewPolar(), 1e-3),
    "resolvents": (Resolvents(), 2e-3),
    "one step": (ProjectedPolar(), 0.2),
    "skew lift of accelerators": (SkewPolar(precision=Precision.DEFAULT), 0.01),
    "one step of accelerators": (ProjectedPolar(precision=Precision.DEFAULT), 0.2),
    "dual ascent": (DualAscent(steps=40), 0.2),
}
NORM = Spectral()
SHAPES = [(48, 16), (20, 16)]  # m >= 2n and n < m < 2n: two representations of the problem


@functools.partial(jax.jit, static_argnums=0)
def _solve(solver, point, grad, dual):
    return solver.solve(NORM, point, grad, dual)


def solve(solver, point, grad):
    return _solve(solver, point, grad, solver.init(point.shape))


def problems(shape):
    """Stack a problem of each family, so that each solver compiles once."""
    pairs = [stiefel_problem(family, *shape) for family in STIEFEL_FAMILIES]
    return tuple(jnp.float32(np.stack(x)) for x in zip(*pairs, strict=True))


def errors(*stacks):
    """Return gaps, tangent residuals and norms of points, gradients and directions, as rows."""
    return np.array([stiefel_errors(*x) for x in zip(*stacks, strict=True)]).T


def gaps(points, grads, answer):
    return errors(points, grads, answer.direction)[0]


@pytest.mark.slow_except("shape0-dual ascent")
@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_direction_is_feasible_and_gap_is_a_bound(name, shape):
    """Wide matrices are solved like their transposes."""
    (solver, largest), (points, grads) = SOLVERS[name], problems(shape)
    tall, wide = solve(solver, points, grads), solve(solver, points.mT, grads.mT)
    for direction, gap in ((tall.direction, tall.gap), (wide.direction.mT, wide.gap)):
        true, residuals, norms = errors(points, grads, direction)
        assert residuals.max() < 1e-5
        # With rounded products, power iteration occasionally underestimates the norm.
        assert norms.max() < 1 + (2e-3 if name == "one step of accelerators" else 1e-5)
        assert true.max() < largest
        assert np.all(gap >= true - 1e-6)
    # Another summation order changes rounding, magnified near critical points and low ranks.
    np.testing.assert_allclose(wide.direction.mT, tall.direction, atol=2e-3)
    np.testing.assert_allclose(wide.gap, tall.gap, rtol=0.1, atol=1e-3)


SIZES = [(256, 64), (128, 64), (80, 64), (300, 10), (15, 10)]
BLOCKS = [(256, 96), (140, 100)]  # resolvents on CPUs, with more columns than a block


@pytest.mark.slow_except("(300, 10)")
@pytest.mark.parametrize("shape", SIZES + BLOCKS, ids=str)
def test_default_solver_accuracy_on_all_families(shape):
    largest, gap = (2e-3, 0.02) if shape in BLOCKS else (1e-3, 3e-3)
    points, grads = problems(shape)
    answer = solve(ClosedForm(), points, grads)
    true, residuals, norms = errors(points, grads, answer.direction)
    assert true.max() < largest
    assert residuals.max() < 1e-5
    assert norms.max() < 1 + 1e-5
    assert np.all(answer.gap >= true - 1e-6)
    assert np.max(answer.gap) < gap
    assert np.max(answer.residual) < 1e-3


@pytest.mark.slow
def test_resolvents_split_large_stacks():
    """A stack of more than 2^22 matrix entries is solved in parts."""
    gaussian = np.random.default_rng(0).standard_normal((2, 2, 7500, 12, 6)).astype(np.float32)
    points, grads = np.linalg.qr(gaussian[0])[0], gaussian[1]
    found = solve(Resolvents(), points, grads)
    wanted = solve(Resolvents(), points[:, -2:], grads[:, -2:])
    np.testing.assert_allclose(found.direction[:, -2:], wanted.direction, atol=1e-3)
    np.testing.assert_allclose(found.gap[:, -2:], wanted.gap, atol=1e-3)


@pytest.mark.slow
def test_more_poles_reduce_the_gap():
    points, grads = problems((48, 16))
    few, many = (
        gaps(points, grads, solve(Resolvents(poles, 1e-2), points, grads)).max() for poles in (2, 6)
    )
    assert many < few / 10


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_default_solver_inverts_only_on_cpus(platform):
    shape = jax.ShapeDtypeStruct((256, 96), jnp.float32)
    traced = _solve.trace(ClosedForm(), shape, shape, ())
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    # A lift is 2n x 2n; resolvents are n x n, stacked over the poles.
    assert ("tensor<8x96x96xf32>" in program) == (platform == "cpu")
    assert ("tensor<192x192xf32>" in program) == (platform != "cpu")


@pytest.mark.slow
def test_published_dual_ascent_depends_on_gradient_scale():
    """Use 256x64 Gaussian gradients of Frobenius norm `s sqrt(n)` and 100 steps of size 0.01."""
    point, grad = stiefel_problem("gaussian", 256, 64)
    grad = grad / np.linalg.norm(grad) * 8
    points, grads = jnp.float32([point] * 3), jnp.float32([s * grad for s in (1e-2, 1e-4, 1e-6)])
    published = 1 - gaps(points, grads, solve(DualAscent(step=0.01, relative=False), points, grads))
    assert published[0] > 0.999
    assert published[1] < 0.7
    assert published[2] < 0.02
    free = 1 - gaps(points, grads, solve(DualAscent(), points, grads))
    assert free.min() > 0.999
