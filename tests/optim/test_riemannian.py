"""Tangent projections, Riemannian Adam and SGD: against NumPy's float64 and known optima."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import RMSToRMS
from tests.optim.instances import SET_GEOMETRY, SETS, Instance

SHAPES = {"w": (6, 3), "kernel": (3, 6), "stack": (2, 5, 3), "sphere": (2, 4), "bias": (4,)}
GEOMETRY = {
    "w": Stiefel(),
    "kernel": Stiefel().transposed(),
    "stack": Stiefel(),
    "sphere": Hypersphere(scale=2.0),
    "bias": Euclidean(),
}
INSTANCE = Instance(optim.project_tangent, GEOMETRY, SHAPES)


def projected(name: str, point: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Compute the tangent part by textbook formulas (Absil et al. 2008, section 3.6)."""
    if name == "kernel":
        return projected("w", point.T, vector.T).T
    if name in ("w", "stack"):
        gram = np.swapaxes(point, -1, -2) @ vector
        return vector - point @ (gram + np.swapaxes(gram, -1, -2)) / 2
    if name == "sphere":
        return vector - point * np.sum(point * vector, -1, keepdims=True) / 4
    return vector


def retracted(name: str, point: np.ndarray) -> np.ndarray:
    if name in ("w", "stack", "kernel"):
        u, _, vt = np.linalg.svd(point, full_matrices=False)
        return u @ vt
    if name == "sphere":
        return 2 * point / np.linalg.norm(point, axis=-1, keepdims=True)
    return point


def adam_loop(params, grads, rate, b1, b2, eps):
    points = {k: np.asarray(x, np.float64) for k, x in params.items()}
    means = {k: np.zeros_like(x) for k, x in points.items()}
    squares = {k: np.zeros_like(x) for k, x in points.items()}
    for count, batch in enumerate(grads, 1):
        for k, x in points.items():
            g = projected(k, x, np.asarray(batch[k], np.float64))
            means[k] = b1 * means[k] + (1 - b1) * g
            squares[k] = b2 * squares[k] + (1 - b2) * g**2
            scaled = np.sqrt(squares[k] / (1 - b2**count)) + eps
            direction = means[k] / (1 - b1**count) / scaled
            points[k] = retracted(k, x - rate * projected(k, x, direction))
    return points


def sgd_loop(params, grads, rate, momentum, nesterov):
    points = {k: np.asarray(x, np.float64) for k, x in params.items()}
    traces = {k: np.zeros_like(x) for k, x in points.items()}
    for batch in grads:
        for k, x in points.items():
            g = projected(k, x, np.asarray(batch[k], np.float64))
            traces[k] = momentum * traces[k] + g
            direction = g + momentum * traces[k] if nesterov else traces[k]
            points[k] = retracted(k, x - rate * projected(k, x, direction))
    return points


def train(tx: Any, params: Any, grads: list[Any]) -> Any:
    update, state = jax.jit(tx.update), tx.init(params)
    for batch in grads:
        updates, state = update(batch, state, params)
        params = optax.apply_updates(params, updates)
    return params


CASES = {
    "adam": (
        optim.riemannian_adam(0.1, GEOMETRY, 0.8, 0.9, 1e-3),
        lambda p, g: adam_loop(p, g, 0.1, 0.8, 0.9, 1e-3),
    ),
    "sgd": (optim.riemannian_sgd(0.3, GEOMETRY), lambda p, g: sgd_loop(p, g, 0.3, 0.0, False)),
    "nesterov": (
        optim.riemannian_sgd(0.1, GEOMETRY, 0.7, nesterov=True),
        lambda p, g: sgd_loop(p, g, 0.1, 0.7, True),
    ),
}


@pytest.mark.slow_except("adam")
@pytest.mark.parametrize("name", CASES)
def test_steps_match_float64_loop(name):
    tx, loop = CASES[name]
    params, grads = INSTANCE.params(), [INSTANCE.grads(seed) for seed in range(8)]
    found, wanted = train(tx, params, grads), loop(params, grads)
    for k in SHAPES:
        np.testing.assert_allclose(found[k], wanted[k], atol=1e-5, err_msg=k)


@pytest.mark.slow
def test_float64_steps_are_accurate_to_1e_12():
    geometry = {k: GEOMETRY[k] for k in ("w", "sphere")}
    with jax.enable_x64(True):

        def wide(tree):
            return {k: np.asarray(tree[k], np.float64) for k in geometry}

        params = {k: jnp.asarray(retracted(k, x)) for k, x in wide(INSTANCE.params()).items()}
        grads = [wide(INSTANCE.grads(seed)) for seed in range(4)]
        tx = optim.riemannian_adam(0.1, geometry, 0.8, 0.9, 1e-3, accumulator_dtype=None)
        found = train(tx, params, grads)
        wanted = adam_loop(params, grads, 0.1, 0.8, 0.9, 1e-3)
        for k in geometry:
            assert found[k].dtype == jnp.float64
            np.testing.assert_allclose(found[k], wanted[k], atol=1e-12, err_msg=k)


@pytest.mark.parametrize(
    "instance",
    [INSTANCE, Instance(optim.project_tangent, SET_GEOMETRY, SETS)],
    ids=["curved", "sets"],
)
def test_project_tangent_matches_manifold_and_is_idempotent(instance):
    params, grads, tx = instance.params(), instance.grads(), instance.tx()
    update = jax.jit(lambda u: tx.update(u, optax.EmptyState(), params)[0])
    found = update(grads)
    straight = {k: e for k, e in instance.geometry.items() if k != "kernel"}  # tested in the loop
    wanted = jax.jit(
        lambda: {k: e.project_tangent(params[k], grads[k]) for k, e in straight.items()}
    )()
    for k, part in wanted.items():
        np.testing.assert_allclose(found[k], part, atol=2e-6)
    again = update(found)
    for k, part in again.items():
        np.testing.assert_allclose(part, found[k], atol=2e-6)
    if "sphere" in params:  # Adam would turn rounding errors into a full step
        for k, part in update(params | {"bias": jnp.zeros(4)}).items():
            np.testing.assert_array_equal(part, 0, err_msg=k)
    large = update(jax.tree.map(lambda x: jnp.float32(2.0**100) * x, grads))
    for k, part in large.items():
        np.testing.assert_allclose(part * 2.0**-100, found[k], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_flat_leaves_are_cast_to_parameter_dtype(dtype):
    geometry = {"flat": Euclidean(RMSToRMS()), "w": Stiefel()}
    params = {"flat": jnp.ones((3, 2), dtype), "w": jnp.eye(4, 2, dtype=dtype)}
    updates = {"flat": jnp.full((3, 2), 1 / 3), "w": jnp.ones((4, 2))}
    found: Any = optim.project_tangent(geometry).update(updates, optax.EmptyState(), params)[0]
    assert found["flat"].dtype == found["w"].dtype == dtype
    np.testing.assert_array_equal(found["flat"], updates["flat"].astype(dtype))


def test_blocks_are_projected_separately():
    fused = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    points = [np.linalg.qr(np.random.default_rng(k).standard_normal((4, 3)))[0] for k in range(2)]
    params = np.concatenate(points, axis=1).astype(np.float32)
    tx = optim.project_tangent(Stiefel().with_axes(-2, -1, out_blocks=2))
    found: Any = jax.jit(tx.update)(fused, optax.EmptyState(), params)[0]
    for block, point in enumerate(points):
        part = slice(3 * block, 3 * block + 3)
        wanted = projected("w", point, fused[:, part])
        np.testing.assert_allclose(found[:, part], wanted, rtol=1e-5, atol=1e-5)


def eigenproblem(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a symmetric matrix with eigenvalues n, ..., 1 and its eigenvectors."""
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))
    return (q * np.arange(n, 0, -1)) @ q.T, q


def minimised(tx: Any, loss: Any, start: jax.Array, steps: int) -> np.ndarray:
    def step(carry, _):
        point, state = carry
        updates, state = tx.update(jax.grad(loss)(point), state, point)
        return (optax.apply_updates(point, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, steps)[0][0])
    return np.asarray(run((start, tx.init(start))), np.float64)


def test_sgd_on_sphere_finds_leading_eigenvector():
    matrix, vectors = eigenproblem(8)
    a, sphere = jnp.float32(matrix), Hypersphere()
    start = sphere.random_point(jax.random.key(1), (8,), jnp.float32)
    tx = optim.riemannian_sgd(0.05, sphere, 0.5)
    found = minimised(tx, lambda x: -x @ a @ x / 2, start, 300)
    assert abs(found @ vectors[:, 0]) > 1 - 1e-6


@pytest.mark.parametrize(
    "tx",
    [
        optim.riemannian_sgd(0.02, Stiefel(), 0.5),
        optim.riemannian_adam(optax.cosine_decay_schedule(0.03, 1500), Stiefel()),
    ],
    ids=["sgd", "adam"],
)
def test_brockett_cost_finds_ordered_eigenvectors(tx):
    """Brockett 1991: `-tr(W^T A W N)/2` with N = diag(3, 2, 1), columns up to sign."""
    matrix, vectors = eigenproblem(8)
    a, weights = jnp.float32(matrix), jnp.array([3.0, 2.0, 1.0])
    start = Stiefel().random_point(jax.random.key(2), (8, 3), jnp.float32)
    found = minimised(tx, lambda w: -jnp.sum(w * (a @ w) * weights) / 2, start, 1500)
    np.testing.assert_allclose(np.abs(vectors[:, :3].T @ found), np.eye(3), atol=2e-3)


def test_long_steps_end_on_manifold():
    params, grads = INSTANCE.params(), [INSTANCE.grads(seed) for seed in range(2)]

    @jax.jit
    def distances(rate):
        tx = optim.riemannian_adam(rate, GEOMETRY)

        def step(carry, batch):
            params, state = carry
            updates, state = tx.update(batch, state, params)
            return (optax.apply_updates(params, updates), state), None

        batches = jax.tree.map(lambda *g: jnp.stack(g), *grads)
        (end, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
        return optim.monitor_distance(GEOMETRY, end)

    for rate in (0.1, 10.0, 1e4):
        assert max(float(jnp.max(d)) for d in distances(rate).values()) < 2e-6
