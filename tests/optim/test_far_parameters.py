"""Parameters that start far from their manifolds are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, LaidOut, Stiefel

GEOMETRY = {
    "he": Stiefel().transposed(),
    "near": Stiefel(),
    "table": EmbeddingRows(),
    "free": Euclidean(),
}


def params():
    rng = np.random.default_rng(3)
    shapes = {"he": (6, 16), "near": (16, 6), "table": (9, 4), "free": (4,)}
    drawn = {k: jnp.asarray(rng.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    projected = optim.project_tree(GEOMETRY, drawn)
    return projected | {"he": drawn["he"] * 0.5, "near": 1.05 * projected["near"]}


@pytest.mark.parametrize(
    "make", [optim.manifold_muon, optim.riemannian_sgd], ids=lambda f: f.__name__
)
def test_init_error_names_path_and_distance(make):
    given = params()
    distance = float(optim.monitor_distance(GEOMETRY, given)["he"])
    with pytest.raises(ValueError, match="project_tree") as caught:
        make(0.1, GEOMETRY).init(given)
    message = str(caught.value)
    assert f"'he' (distance {distance:.2g})." in message
    assert "'near'" not in message
    assert distance > 0.3


def test_many_far_parameters_give_one_error():
    far = [jnp.full((4, 2), 3.0)] * 9
    with pytest.raises(ValueError, match=r"'0' .*'4' \(distance [^,]*, 4 more\."):
        optim.retract([Stiefel()] * 9).init(far)


def test_traced_or_near_parameters_pass():
    given, tx = params(), optim.manifold_muon(0.1, GEOMETRY)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    jax.jit(tx.init)(given)
    jax.jit(lambda: tx.init(given))()  # constants
    jax.eval_shape(tx.init, shapes)
    tx.init(optim.project_tree(GEOMETRY, given))


@pytest.mark.parametrize("manifold", [EmbeddingRows(), EmbeddingRows(2.0).transposed()])
def test_zero_embedding_rows_pass(manifold):
    rng = np.random.default_rng(4)
    table = optim.project_tree(manifold, jnp.asarray(rng.standard_normal((6, 6)), jnp.float32))
    row = np.s_[:, 2] if isinstance(manifold, LaidOut) else np.s_[2]
    optim.retract(manifold).init(table.at[row].set(0))
    with pytest.raises(ValueError, match="distance 0.5"):
        optim.retract(manifold).init(table.at[row].multiply(0.5))
