"""Averages of weights leave the manifold; projecting them back lowers the loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.optim import hyperball, match_norms
from tests.optim.training import drawn

SHAPES = {"a": (24, 16), "b": (24, 24), "c": (10, 24)}
MATRIX = Hypersphere(ndim=2)


def network(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(jax.nn.relu(x @ params["a"].T) @ params["b"].T)
    return params["gain"] * (hidden @ params["c"].T)


def weights(key: Any, gain: float) -> Any:
    """Draw matrices of variance 2 / fan-in."""
    keys = dict(zip(SHAPES, jax.random.split(key, 3), strict=True))
    matrices = {k: jax.random.normal(keys[k], s) * np.sqrt(2 / s[1]) for k, s in SHAPES.items()}
    return matrices | {"gain": jnp.full((), gain)}


def losses(kind: str, rate: float, key: Any, steps: int) -> Any:
    """Return the losses of the last weights, their average and the projected average.

    The examples are a stream; labels are drawn from the probabilities of a teacher network of the
    same shape. The learning rate is constant.
    """
    teacher_key, start_key, stream, test = jax.random.split(key, 4)
    teacher, student = weights(teacher_key, 2.0), weights(start_key, 1.0)
    entry: Any = Stiefel(solver=ProjectedPolar()) if kind == "Stiefel" else MATRIX
    geometry = dict.fromkeys(SHAPES, entry) | {"gain": None}
    if kind == "Stiefel":
        tx = optim.manifold_muon(rate, geometry, track_gap=False)
        student = optim.project_tree(geometry, student)
    else:
        tx = hyperball(optax.scale_by_adam(), rate, geometry)
    tx = optim.hybrid(tx, geometry, optax.adam(1e-2))

    def loss(params, key, count):
        x = jax.random.normal(key, (count, SHAPES["a"][1]))
        labels = jax.random.categorical(jax.random.fold_in(key, 1), network(teacher, x))
        logits = network(params, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(carry, key):
        params, state, average = carry
        updates, state = tx.update(jax.grad(loss)(params, key, 32), state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.01)
        return (params, state, average), None

    carry = student, tx.init(student), student
    (params, _, average), _ = jax.lax.scan(step, carry, jax.random.split(stream, steps))
    back = optim.project_tree if kind == "Stiefel" else lambda g, x: match_norms(g, x, params)
    return jnp.stack([loss(p, test, 4096) for p in (params, average, back(geometry, average))])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rate"), [("Stiefel", 0.1), ("AdamH", 0.05)])
def test_projected_average_has_lowest_loss(kind, rate):
    keys = jax.random.split(jax.random.key(0), 4)
    found = jax.jit(jax.vmap(lambda key: losses(kind, rate, key, 500)))(keys)
    last, average, projected = np.mean(found, axis=0)
    assert projected < min(last, average)


def test_match_norms_changes_only_norms():
    params, other = (drawn(seed, {"w": (2, 3, 4), "b": (3,), "rest": ()}) for seed in (1, 2))
    geometry = {"w": MATRIX.stacked(), "b": Euclidean(), "rest": None}
    found = match_norms(geometry, other, params)
    norms = [np.linalg.norm(x["w"], axis=(1, 2)) for x in (found, params, other)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)
    units = [x["w"] / n[:, None, None] for x, n in ((found, norms[0]), (other, norms[2]))]
    np.testing.assert_allclose(units[0], units[1], rtol=1e-5)
    for name in ("b", "rest"):
        np.testing.assert_array_equal(found[name], other[name])
