"""Combined norms against the definition of a duality map, and against brute force."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, Manifold, Stiefel
from manifoldmuon.norms import (
    Combination,
    Frobenius,
    L1ToRMS,
    Max,
    MaxAbs,
    RMSToRMS,
    RootSumSquares,
    Sum,
)
from manifoldmuon.testing import check_sharding
from tests.compiled import ask
from tests.optim.instances import Instance
from tests.optim.test_sharding import MESHES, shardings
from tests.optim.test_sharding import SHAPES as SHARDED

# numpy: the norm of a vector of sizes and its dual
COMBINATIONS: dict[Combination, tuple[Any, Any]] = {
    Max(): (np.inf, 1),
    Sum(): (1, np.inf),
    RootSumSquares(): (2, 2),
}
GEOMETRY: dict[str, Any] = {
    "stack": Euclidean(RMSToRMS()),
    "kernel": Euclidean(RMSToRMS()).transposed(),
    "table": Euclidean(L1ToRMS()),
    "stiefel": Stiefel(2.0),
    "sphere": Hypersphere(3.0),
    "rows": EmbeddingRows(),
    "bias": Euclidean(MaxAbs(ndim=1)),
    "frozen": Euclidean(),
}
SHAPES = {
    "stack": (2, 4, 3),
    "kernel": (3, 5),
    "table": (4, 3),
    "stiefel": (5, 3),
    "sphere": (2, 4),
    "rows": (3, 4),
    "bias": (4,),
    "frozen": (3,),
}
BUDGETS = {
    "stack": np.array([0.5, 2.0]).reshape(2, 1, 1),
    "kernel": 0.3,
    "table": 1.5,
    "stiefel": 0.25,
    "sphere": 0.7,
    "rows": 0.1,
    "bias": 1.0,
    "frozen": 0.0,
}


def drawn(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in SHAPES.items()}


@jax.jit
def setting() -> tuple[Any, Any]:
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    return optim.init_tree(GEOMETRY, jax.random.key(0), shapes), drawn(1)


def manifold_at(name: str) -> Manifold:
    return Euclidean(RMSToRMS()) if name == "kernel" else GEOMETRY[name]


def inward(name: str, w: Any) -> Any:
    return w.T if name == "kernel" else w


@jax.jit
def sizes(step: Any) -> Any:
    """Norms of all points in units of their budgets; frozen ones do not count."""
    found = [
        (manifold_at(k).norm.norm(inward(k, w)) / jnp.squeeze(jnp.asarray(BUDGETS[k]))).ravel()
        for k, w in step.items()
        if k != "frozen"
    ]
    return jnp.concatenate(found)


@jax.jit
def tangents(params: Any, step: Any) -> Any:
    return {
        k: w if k == "kernel" else manifold_at(k).project_tangent(params[k], w)
        for k, w in step.items()
    }


def inner(first: Any, second: Any) -> float:
    return sum(
        float(np.sum(np.asarray(first[k], np.float64) * np.asarray(second[k], np.float64)))
        for k in first
    )


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Any]:
    return setting()


@pytest.fixture(scope="module")
def leafwise(problem) -> Any:
    """Every leaf's own steepest direction."""
    tx = optim.scale_by_steepest(GEOMETRY)
    return jax.jit(lambda w, g: tx.update(g, tx.init(w), w)[0])(*problem)


@functools.cache
def compiled(combination: Combination) -> Any:
    tx = optim.scale_by_duality(GEOMETRY, BUDGETS, combination)
    return jax.jit(lambda g, w: tx.update(g, tx.init(w), w)[0])


@pytest.mark.slow_except("Sum()")
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_no_step_of_norm_one_does_better(combination, problem, leafwise):
    """The definition: norm at most 1, and no competitor of norm 1 gains more."""
    params, grads = problem
    p, dual = COMBINATIONS[combination]
    step = compiled(combination)(grads, params)
    assert not np.any(step["frozen"])
    assert np.linalg.norm(sizes(step), p) <= 1 + 1e-3
    best = inner(grads, step)
    # The dual norm of the whole from the layers' own, which each manifold certifies.
    gains = []
    for k, a in leafwise.items():
        products = np.asarray(grads[k] * a * BUDGETS[k], np.float64)
        points = (2, -1) if k in ("stack", "sphere") else (1, -1)
        gains += list(products.reshape(points).sum(axis=1))
    np.testing.assert_allclose(best, np.linalg.norm(gains, dual), rtol=1e-3)
    rng = np.random.default_rng(2)
    pull, own = tangents(params, grads), list(leafwise)
    for trial in range(60):
        # From anywhere, from along the gradient, and from the best directions at other lengths.
        start = drawn(100 + trial) if trial % 3 == 0 else pull if trial % 3 == 1 else leafwise
        length = rng.exponential(size=len(own)) ** rng.choice([1, 4])
        rival = {k: start[k] * length[i] for i, k in enumerate(own)}
        rival["frozen"] = jnp.zeros(3)
        rival = tangents(params, rival)
        scale = np.linalg.norm(sizes(rival), p)
        assert inner(grads, rival) / scale <= best * (1 + 2e-3)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_two_leaves_against_every_direction(combination):
    """Two leaves of numbers, where the best step is found by trying all of a fine circle."""
    p, dual = COMBINATIONS[combination]
    geometry = {"a": Euclidean(Frobenius(ndim=1)), "b": Euclidean(MaxAbs(ndim=1))}
    budgets = {"a": 0.5, "b": 2.0}
    tx = optim.scale_by_duality(geometry, budgets, combination)
    update = jax.jit(lambda g: tx.update(g, tx.init(g), g)[0])
    turn = np.linspace(0, 2 * np.pi, 100_001)
    circle = np.stack([np.cos(turn), np.sin(turn)])
    circle = circle / np.linalg.norm(circle / np.array([[0.5], [2.0]]), p, axis=0)
    for grad in ((3.0, 1.0), (-1.0, 0.2), (0.0, 1.0), (5.0, -1.0)):
        step: Any = update({"a": jnp.array(grad[:1]), "b": jnp.array(grad[1:])})
        best = np.max(np.asarray(grad) @ circle)
        found = grad[0] * float(step["a"][0]) + grad[1] * float(step["b"][0])
        # The circle's points are 6e-5 apart, and the best one may be a corner between two.
        np.testing.assert_allclose(found, best, rtol=1e-4)
        lengths = np.abs([float(step["a"][0]) / 0.5, float(step["b"][0]) / 2.0])
        assert np.linalg.norm(lengths, p) <= 1 + 1e-6
        np.testing.assert_allclose(
            found, np.linalg.norm([0.5 * grad[0], 2.0 * grad[1]], dual), rtol=1e-6
        )


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_vectors_against_numpy(combination):
    p, dual = COMBINATIONS[combination]
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1.0, 1e30):
        x = jnp.asarray(scale * rng.random(5), jnp.float32)
        np.testing.assert_allclose(
            ask(combination.norm, x), np.linalg.norm(np.float64(x), p), rtol=1e-6
        )
        wanted = np.linalg.norm(np.float64(x), dual)
        np.testing.assert_allclose(ask(combination.dual_norm, x), wanted, rtol=1e-6)
        given = np.float64(ask(combination.dualize, x))
        np.testing.assert_allclose(np.dot(given, np.float64(x)), wanted, rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(given, p), 1, rtol=1e-6)
    assert not np.any(ask(combination.dualize, np.zeros(2, np.float32)))
    assert np.isnan(ask(combination.dualize, np.array([1.0, np.nan], np.float32))).any()
    assert ask(combination.dualize, jnp.zeros(0)).shape == (0,)


def test_the_sum_moves_one_copy_of_one_leaf(problem):
    params, grads = problem
    update = compiled(Sum())
    louder = grads | {"stack": grads["stack"].at[1].multiply(100.0)}
    for scale in (2.0**-100, 1.0, 2.0**100):
        step = update(jax.tree.map(lambda g, c=scale: g * c, louder), params)
        assert not np.any(step["stack"][0])
        top = np.linalg.norm(np.asarray(step["stack"][1], np.float64), 2)
        np.testing.assert_allclose(top * np.sqrt(3 / 4), 2.0, rtol=1e-3)
        assert not any(np.any(x) for k, x in step.items() if k != "stack")
    still = update(jax.tree.map(jnp.zeros_like, grads), params)
    assert not any(np.any(x) for x in jax.tree.leaves(still))
    spoilt = update(grads | {"bias": jnp.full(4, jnp.nan)}, params)
    assert np.isnan(spoilt["bias"]).all()


@pytest.mark.slow
def test_the_alias_takes_the_combination(problem):
    names = ("kernel", "sphere", "bias")
    params, grads, geometry, budgets = (
        {k: tree[k] for k in names} for tree in (*problem, GEOMETRY, BUDGETS)
    )
    for combination in COMBINATIONS:
        alias = optim.manifold_muon(0.1, geometry, None, budgets=budgets, combination=combination)
        by_hand = optim.chain(
            optim.scale_by_duality(geometry, budgets, combination),
            optax.scale(-0.1),
            optim.retract(geometry),
        )
        found, wanted = jax.jit(
            lambda g, w, a=alias, b=by_hand: [tx.update(g, tx.init(w), w)[0] for tx in (a, b)]
        )(grads, params)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_muon_takes_the_combination(combination):
    geometry = {"w": Euclidean(RMSToRMS()), "b": Euclidean()}
    params = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    grads = {"w": drawn(1)["stack"][0], "b": drawn(1)["frozen"]}
    flat = optim.muon(0.1, geometry, None, method=None, combination=combination)
    by_hand = optax.chain(
        optim.scale_by_duality(geometry, 1.0, combination), optax.scale_by_learning_rate(0.1)
    )
    found, wanted = (
        ask(lambda g, w, tx=tx: tx.update(g, tx.init(w), w)[0], grads, params)
        for tx in (flat, by_hand)
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.slow
def test_on_a_mesh():
    mesh = jax.make_mesh(*MESHES["explicit"])
    geometry = {"m": Euclidean(L1ToRMS()), "stack": Hypersphere(), "bias": Euclidean()}
    arguments = {"budgets": {"m": 0.5, "stack": 2.0, "bias": 1.0}, "combination": RootSumSquares()}
    instance = Instance(optim.scale_by_duality, geometry, SHARDED, arguments)
    check_sharding(instance.tx(), instance.params(), instance.grads(), shardings(mesh))
