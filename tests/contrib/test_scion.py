"""Conditional gradients in norm balls, against the published algorithm in NumPy's float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import Frobenius, L1ToRMS, MaxAbs, RMSToRMS, RootDim

GEOMETRY = {
    "kernel": Euclidean(RMSToRMS()).transposed(),
    "table": Euclidean(L1ToRMS()),
    "head": Euclidean(MaxAbs()),
    "bias": Euclidean(Frobenius(1, RootDim())),
}
SHAPES = {"kernel": (3, 6), "table": (5, 4), "head": (4, 3), "bias": (6,)}
RADIUS = {"kernel": 5.0, "table": 2.0, "head": 0.5, "bias": 1.0}


def polar(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


# The table of linear minimisation oracles of the paper, and the norms of their balls.
LMO = {
    "kernel": lambda g: np.sqrt(2) * polar(g),
    "table": lambda g: 2 * g / np.linalg.norm(g, axis=1, keepdims=True),
    "head": np.sign,
    "bias": lambda g: np.sqrt(6) * g / np.linalg.norm(g),
}
NORM = {
    "kernel": lambda w: np.linalg.norm(w, 2) / np.sqrt(2),
    "table": lambda w: np.linalg.norm(w, axis=1).max() / 2,
    "head": lambda w: np.abs(w).max(),
    "bias": lambda w: np.linalg.norm(w) / np.sqrt(6),
}


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(tx: Any, params: Any, steps: int) -> list[Any]:
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, seen = tx.init(params), []
    for seed in range(1, steps + 1):
        params, state = step(params, state, drawn(seed))
        seen.append(params)
    return seen


@pytest.mark.parametrize("constrained", [True, False])
def test_five_steps_of_the_published_algorithm(constrained):
    tx = contrib.scion(0.2, GEOMETRY, RADIUS, 0.7, constrained=constrained, method=None)
    found = train(tx, drawn(0), 5)[-1]
    for name, lmo in LMO.items():
        w, d = drawn(0)[name].astype(float), np.zeros(SHAPES[name])
        for seed in range(1, 6):
            d = 0.7 * d + 0.3 * drawn(seed)[name]
            step = RADIUS[name] * lmo(d)
            w = (0.8 if constrained else 1.0) * w - 0.2 * step
        np.testing.assert_allclose(found[name], w, rtol=1e-4, atol=1e-4, err_msg=name)


def test_weights_stay_in_their_balls_and_come_in_from_outside():
    shapes = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    inside = jax.jit(lambda: optim.init_tree(GEOMETRY, jax.random.key(0), shapes))()
    edge = {name: RADIUS[name] * inside[name] for name in SHAPES}
    tx = contrib.scion(0.3, GEOMETRY, RADIUS)
    for params in train(tx, edge, 12):
        for name, norm in NORM.items():
            assert norm(np.asarray(params[name], float)) <= 1.015 * RADIUS[name]
    far = {name: 10 * weight for name, weight in edge.items()}
    for count, params in enumerate(train(tx, far, 12), start=1):
        for name, norm in NORM.items():
            excess = norm(np.asarray(params[name], float)) / RADIUS[name] - 1.015
            assert excess <= 9 * 0.7**count


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_leaves_the_ball(rate):
    with pytest.raises(ValueError, match=r"learning_rate must be a finite number in \["):
        contrib.scion(rate, GEOMETRY)


def test_constrained_manifolds_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\['w'\] lie on constrained manifolds"):
        contrib.scion(0.1, Stiefel()).init({"w": jnp.eye(3)})
