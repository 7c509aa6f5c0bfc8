"""`normalize`: every leaf of an update has its target norm, checked by NumPy's SVD."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, manifolds, norms, optim
from manifoldmuon.modules import Embed, Linear, ReLU
from tests.compiled import point_of
from tests.modules.measure import random_like
from tests.optim.training import drawn, first_update

FLAT, RMS = manifolds.Euclidean(norms.Spectral()), manifolds.Euclidean(norms.RMSToRMS())


def top(matrices: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.asarray(matrices, np.float64), 2, axis=(-2, -1))


def length(w: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(w**2))


# Geometry, shape, and the norm of each point by definition.
LEAVES: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "layers": (RMS.stacked(), (3, 5, 4), lambda w: np.sqrt(4 / 5) * top(w)),
    "flax": (RMS.transposed(), (4, 6), lambda w: np.sqrt(4 / 6) * top(w)),
    "hwio": (
        manifolds.Euclidean(norms.ConvRMSToRMS()).with_axes(in_axes=-2, out_axes=-1),
        (2, 2, 3, 5),
        lambda w: 4 * np.sqrt(3 / 5) * np.max(top(w)),
    ),
    "oihw": (FLAT.with_axes(-3, -4), (4, 3, 2, 2), lambda w: top(np.moveaxis(w, (0, 1), (2, 3)))),
    "heads": (FLAT.with_axes(0, 2), (5, 2, 3), lambda w: top(np.moveaxis(w, 1, 0))),
    "table": (
        manifolds.Euclidean(norms.L1ToRMS()),
        (6, 4),
        lambda w: np.max(np.sqrt(np.mean(w**2, axis=1))),
    ),
    "bias": (manifolds.Euclidean(), (3,), length),
    "sign": (manifolds.Euclidean(norms.MaxAbs(ndim=1)), (4,), lambda w: np.max(np.abs(w))),
    "scalar": (manifolds.Euclidean(norms.Frobenius(ndim=0)), (), length),
}
GEOMETRY, SHAPES = ({k: leaf[i] for k, leaf in LEAVES.items()} for i in range(2))
NORMS = {k: leaf[2] for k, leaf in LEAVES.items()}
BUDGETS = {name: 0.5 + i for i, name in enumerate(SHAPES)} | {
    "layers": np.array([0.25, 1.0, 3.0]).reshape(3, 1, 1)
}


@pytest.mark.slow
def test_updates_have_norm_equal_to_budget():
    base = optax.scale_by_adam()
    tx = optim.normalize(base, GEOMETRY, BUDGETS, iterations=norms.PowerIterations(2, 1000))
    params, grads = drawn(0, SHAPES), drawn(1, SHAPES)

    @jax.jit
    def both(grads, params):
        state: Any = tx.init(params)
        return tx.update(grads, state, params)[0], base.update(grads, state.base, params)[0]

    updates, plain = both(grads, params)
    for name, found in updates.items():
        points = np.asarray(found, np.float64)
        np.testing.assert_allclose(NORMS[name](points), np.squeeze(BUDGETS[name]), rtol=1e-5)
        if name not in ("layers", "oihw", "heads"):  # a single point: the direction stays
            direction = np.asarray(plain[name], np.float64)
            cosine = np.vdot(points, direction) / (length(points) * length(direction))
            np.testing.assert_allclose(cosine, 1, rtol=1e-6)


@pytest.mark.slow
def test_cold_start_estimates_norm_within_6_percent():
    """Sixteen steps of power iteration from a cold start; two steps would miss a fifth."""
    params = drawn(0, {"w": (64, 64), "v": (64, 64)})
    missed = {}
    for cold in (2, 16):
        steps = norms.PowerIterations(cold_start_steps=cold)
        tx = optim.normalize(optax.identity(), FLAT, iterations=steps)
        missed[cold] = max(float(top(u)) - 1 for u in first_update(tx, params, params).values())
    assert 0 <= missed[16] < 0.06 < missed[2]


def test_singular_vectors_are_warm_started():
    params = drawn(0, {"w": (8, 5)})
    tx = optim.normalize(optax.identity(), FLAT, iterations=norms.PowerIterations(1, 1))
    state: Any = tx.init(params)
    update: Any = jax.jit(tx.update)
    missed = []
    for _ in range(60):
        updates, state = update(params, state, params)
        missed.append(float(top(updates["w"])) - 1)
    assert missed[0] > 0.01
    assert abs(missed[-1]) < 1e-5
    right = np.linalg.svd(np.asarray(params["w"], np.float64))[2][0]
    np.testing.assert_allclose(np.abs(state.vectors["w"] @ right), 1, rtol=1e-4)
    bad = {"w": jnp.asarray(params["w"]).at[0, 0].set(jnp.nan)}
    spoilt, after = update(bad, state, params)
    assert np.isnan(spoilt["w"]).all()
    np.testing.assert_array_equal(after.vectors["w"], state.vectors["w"])
    still, after = update({"w": jnp.zeros((8, 5))}, state, params)
    assert not np.any(still["w"])
    np.testing.assert_array_equal(after.vectors["w"], state.vectors["w"])


CONSTRAINED = [manifolds.Stiefel(2.0), manifolds.Orthogonal(), manifolds.Hypersphere(3.0, ndim=2)]


@pytest.mark.slow_except("Hypersphere")
@pytest.mark.parametrize("manifold", CONSTRAINED, ids=lambda manifold: type(manifold).__name__)
def test_tangent_part_is_normalised(manifold: manifolds.Manifold):
    shape = (5, 5)
    point = point_of(manifold, shape)
    tx = optim.normalize(optax.identity(), manifold, 0.5)

    @jax.jit
    def ask(grad, point):
        found: Any = tx.update(grad, tx.init(point), point)[0]
        return found, manifold.project_tangent(point, found), manifold.norm.norm(found)

    found, tangent, norm = ask(drawn(0, {"w": shape})["w"], point)
    np.testing.assert_allclose(tangent, found, atol=1e-5)
    np.testing.assert_allclose(norm, 0.5, rtol=0.02)
    # The gradient of the squared norm is normal to all three manifolds: the update is zero.
    assert not np.any(ask(7.0 * point, point)[0])


@pytest.mark.slow
def test_step_at_boundary_cannot_leave_convex_set():
    """Updates ascend and are subtracted, so an inward update would move the point out."""
    ball, point = manifolds.SpectralBall(), np.zeros((4, 2), np.float32)
    point[0, 0], point[1, 1] = 1.0, 0.5
    updates = np.stack([point * [1, 0], -point * [1, 0]])
    updates[:, 2, 1] = 1.0
    wanted = updates * np.array([[1, 1], [0, 1]])[:, None]
    points = np.stack([point, point])
    geometry = ball.stacked()
    for tx in optim.normalize(optax.identity(), geometry), contrib.scale_by_neuron_rms(geometry):
        found = first_update(tx, np.float32(updates), points)
        np.testing.assert_array_equal(np.abs(found) > 1e-6, wanted != 0)


@pytest.mark.slow
def test_normed_step_has_module_target_norms():
    """In NumPy, each leaf is divided by its norm and multiplied by the module's budget."""
    module = Linear(3, 8) @ (2 * Linear(8, 8)) ** 2 @ ReLU() @ Linear(8, 4, mass=2.0) @ Embed(4, 5)
    params = module.init(jax.random.key(0))
    grads = random_like(params)
    tx = optim.normed(0.5, optax.identity(), module, iterations=norms.PowerIterations(2, 300))
    updates = first_update(tx, grads, params)
    leaves = [jax.tree.leaves(tree) for tree in (updates, grads, module.budgets())]
    for index, (found, grad, budget) in enumerate(zip(*leaves, strict=True)):
        g = np.asarray(grad, np.float64)
        if index == 0:
            size = np.max(np.sqrt(np.mean(g**2, axis=-1)))
        else:
            size = (np.sqrt(g.shape[-1] / g.shape[-2]) * top(g))[..., None, None]
        np.testing.assert_allclose(found, -0.5 * budget * g / size, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradient_rounding_errors_do_not_grow():
    """Rows of Adam's first update have equal lengths: the result must not depend on the largest.

    Such errors come from another order of summation, as in other compiled or sharded programs.
    """
    geometry = {"free": FLAT, "curved": manifolds.Stiefel()}
    tx = optim.normalize(optax.scale_by_adam(), geometry)
    rng = np.random.default_rng(0)
    params = {"free": jnp.zeros((24, 16)), "curved": jnp.eye(16, 12)}
    grads = [jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params) for _ in "abc"]
    update = jax.jit(tx.update)

    def run(change):
        state: Any = tx.init(params)
        for grad in grads:
            updates, state = update(jax.tree.map(change, grad), state, params)
        return updates, state.vectors

    nudged = run(lambda g: g * (1 + 1e-7 * np.sign(rng.normal(size=g.shape))).astype(np.float32))
    for found, wanted in zip(*map(jax.tree.leaves, (nudged, run(lambda g: g))), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(np.max(np.abs(wanted))))
