"""Tangent projections, Riemannian Adam and SGD: against NumPy's float64 and known optima."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from tests.optim.instances import Instance
from tests.optim.training import drawn, train

SHAPES = {"w": (6, 3), "kernel": (3, 6), "stack": (2, 5, 3), "sphere": (2, 4), "bias": (4,)}
GEOMETRY = {
    "w": Stiefel(),
    "kernel": Stiefel().transposed(),
    "stack": Stiefel().stacked(),
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


def adam_loop(params, grads, rate=0.1, b1=0.8, b2=0.9, eps=1e-3):
    points = {k: np.asarray(x, np.float64) for k, x in params.items()}
    means: Any = dict.fromkeys(points, 0.0)
    squares: Any = dict.fromkeys(points, 0.0)
    for count, batch in enumerate(grads, 1):
        for k, x in points.items():
            g = projected(k, x, np.asarray(batch[k], np.float64))
            means[k] = b1 * means[k] + (1 - b1) * g
            squares[k] = b2 * squares[k] + (1 - b2) * g**2
            scaled = np.sqrt(squares[k] / (1 - b2**count)) + eps
            direction = means[k] / (1 - b1**count) / scaled
            points[k] = retracted(k, x - rate * projected(k, x, direction))
    return points


def sgd_loop(params, grads, rate=0.1, momentum=0.7):
    points = {k: np.asarray(x, np.float64) for k, x in params.items()}
    traces: Any = dict.fromkeys(points, 0.0)
    for batch in grads:
        for k, x in points.items():
            g = projected(k, x, np.asarray(batch[k], np.float64))
            traces[k] = momentum * traces[k] + g
            points[k] = retracted(k, x - rate * projected(k, x, g + momentum * traces[k]))
    return points


CASES = {
    "adam": (optim.riemannian_adam(0.1, GEOMETRY, 0.8, 0.9, 1e-3), adam_loop),
    "nesterov": (optim.riemannian_sgd(0.1, GEOMETRY, 0.7, nesterov=True), sgd_loop),
}


@pytest.mark.slow_except("adam")
@pytest.mark.parametrize("name", CASES)
def test_steps_match_float64_loop(name):
    tx, loop = CASES[name]
    params, grads = INSTANCE.params(), [INSTANCE.grads(seed) for seed in range(8)]
    (found, _), wanted = train(tx, params, grads), loop(params, grads)
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
        found, _ = train(tx, params, grads)
        wanted = adam_loop(params, grads)
        for k in geometry:
            assert found[k].dtype == jnp.float64
            np.testing.assert_allclose(found[k], wanted[k], atol=1e-12, err_msg=k)


def test_project_tangent_matches_formula():
    params, grads, tx = INSTANCE.params(), INSTANCE.grads(), INSTANCE.tx()
    update = jax.jit(lambda u: tx.update(u, optax.EmptyState(), params)[0])
    found, large = update(grads), update(jax.tree.map(lambda x: jnp.float32(2.0**100) * x, grads))
    for name in SHAPES:
        point, grad = (np.asarray(tree[name], np.float64) for tree in (params, grads))
        np.testing.assert_allclose(found[name], projected(name, point, grad), atol=2e-6)
        np.testing.assert_allclose(large[name] * 2.0**-100, found[name], atol=1e-6)
    # Adam would turn rounding errors into a full step.
    for name, part in update(params | {"bias": jnp.zeros(4)}).items():
        np.testing.assert_array_equal(part, 0, err_msg=name)


def test_projected_gradients_leave_the_rest_alone():
    """As `docs/minimize.md` has it: `clip` comes before the split of the parameters."""
    geometry = {"w": Stiefel(), "b": None}
    params: Any = drawn(0, {"w": (4, 2), "b": (3,)}) | {"w": jnp.eye(4, 2)}
    grads: Any = drawn(1, {"w": (4, 2), "b": (3,)})
    first = optim.project_tangent(geometry)
    tx = optim.manifold_muon(0.1, geometry, clip=first, rest=optax.adam(1e-2))
    found: Any = tx.update(grads, tx.init(params), params)[0]
    projected: Any = first.update(grads, first.init(params), params)[0]
    alone = optim.manifold_muon(0.1, Stiefel())
    wanted: Any = alone.update(projected["w"], alone.init(params["w"]), params["w"])[0]
    np.testing.assert_allclose(found["w"], wanted, atol=1e-6)
    np.testing.assert_allclose(found["b"], -1e-2 * np.sign(grads["b"]), rtol=1e-5)
