"""The defaults on an emulated TPU: products in one, three or six bfloat16 passes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import Precision

from manifoldmuon import optim
from manifoldmuon._internal.matrices.arrays import product, product_eps
from manifoldmuon.linalg import TRAINING_MSIGN, msign
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from tests.oracles.passes import multiplications, on_tpu
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

PASSES = {Precision.DEFAULT: 1, Precision.HIGH: 3, Precision.HIGHEST: 6}


def drawn(shape, seed=0):
    return jnp.float32(np.random.default_rng(seed).standard_normal(shape))


def test_single_pass_multiplies_rounded_factors():
    x = drawn((40, 30))
    one = on_tpu(lambda x: product(x.mT, x, Precision.DEFAULT))(x)
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(one, rounded.T @ rounded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PASSES)
def test_passes_have_declared_rounding_and_cost(precision):
    def twice(x):  # in a loop, in a call, and once unused
        product(x, x)
        body = jax.jit(lambda x: product(x, x, precision) / 40)
        return jax.lax.fori_loop(0, 2, lambda _, x: body(x), x)

    x = drawn((40, 40))
    exact = np.asarray(x, np.float64)
    for _ in range(2):
        exact = exact @ exact / 40
    miss = np.linalg.norm(on_tpu(twice)(x) - exact) / np.linalg.norm(exact)
    eps = product_eps(precision, jnp.float32)
    sums = 2 * np.sqrt(40) * float(jnp.finfo(jnp.float32).eps)  # two sums of forty float32 terms
    assert eps / 50 < miss < eps + sums
    assert multiplications(twice, x) == 2 * 40**3 * PASSES[precision]


def test_muon_is_cheaper_and_more_accurate_than_optax():
    tx = optax.contrib.scale_by_muon(beta=0.0)
    peer = lambda grad: tx.update(grad, tx.init(grad))[0]  # noqa: E731
    ours = functools.partial(msign, method=TRAINING_MSIGN)
    for shape in ((256, 64), (96, 96)):
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert multiplications(ours, like) <= 0.8 * multiplications(peer, like)
    left, _, right = np.linalg.svd(drawn((96, 32)), full_matrices=False)
    for values in (np.geomspace(1, 0.05, 32), np.linspace(1, 0.5, 32), np.repeat([1, 0.1], 16)):
        x = jnp.float32(left * values @ right)
        signs = [jax.jit(on_tpu(f))(x) for f in (ours, peer)]
        reached, theirs = (np.abs(np.diag(left.T @ sign @ right.T) - 1).max() for sign in signs)
        assert reached < min(0.03, theirs / 5)


@pytest.mark.slow_except("solver0-shape0-0.2")
@pytest.mark.parametrize(
    ("solver", "shape", "largest"),
    [
        (ProjectedPolar(), (48, 16), 0.2),
        (ProjectedPolar(), (16, 16), 0.03),
        (ClosedForm(), (48, 16), 0.015),
        (ClosedForm(), (20, 16), 0.015),
    ],
)
def test_single_pass_directions_have_valid_gaps(solver, shape, largest):
    pairs = [stiefel_problem(family, *shape) for family in STIEFEL_FAMILIES]
    points, grads = (jnp.float32(np.stack(x)) for x in zip(*pairs, strict=True))
    normal = points @ (points.mT @ grads)  # only rounding is left
    solve = jax.jit(on_tpu(lambda p, g: Stiefel(solver=solver).steepest(p, g, ())))
    answer = solve(points, grads.at[0].multiply(2.0**60))
    for *problem, gap in zip(points, grads, answer.direction, answer.gap, strict=True):
        errors = stiefel_errors(*problem)
        assert errors.gap < largest
        assert errors.gap < gap + 2e-3
        assert errors.residual < 0.02
        assert errors.norm < 1.03
    symmetric = points @ (normal.mT @ normal)
    answer = solve(points, symmetric.at[1].set(0).at[2, 0, 0].set(jnp.nan))
    np.testing.assert_array_equal(answer.direction[:2], 0)
    assert np.isnan(answer.direction[2]).all()


@pytest.mark.slow_except("float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_walk_stays_on_manifold_to_float32(dtype):
    """For float32 parameters, and for the master copies of bfloat16 parameters."""
    geometry = Stiefel(solver=ProjectedPolar())
    tx = optim.manifold_muon(0.05, geometry, track_gap=False)
    tx = optim.with_master_copies(tx) if dtype == jnp.bfloat16 else tx
    start = geometry.random_point(jax.random.key(0), (24, 8), jnp.float32).astype(dtype)
    update = on_tpu(tx.update)

    def step(carry, key):
        weight, state = carry
        updates, state = update(jax.random.normal(key, weight.shape), state, weight)
        weight: Any = optax.apply_updates(weight, updates)
        copy = state.copies if dtype == jnp.bfloat16 else weight
        return (weight, state), geometry.distance(copy)

    keys = jax.random.split(jax.random.key(1), 200)
    walk = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))
    assert np.max(walk((start, tx.init(start)))[1]) < 1e-6
