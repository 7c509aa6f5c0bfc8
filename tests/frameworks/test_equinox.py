"""Geometries of Equinox models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.manifolds import EmbeddingRows, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar

eqx: Any = pytest.importorskip("equinox")
reading = pytest.importorskip("manifoldmuon.frameworks.equinox")

W = Stiefel(solver=ProjectedPolar())
KEY = jax.random.key(0)


@pytest.mark.parametrize("per_head", [False, True])
def test_module_types_get_expected_manifolds(per_head):
    model = {
        "embed": eqx.nn.Embedding(9, 8, key=KEY),
        "attention": eqx.nn.MultiheadAttention(4, 8, use_query_bias=True, key=KEY),
        "mlp": eqx.nn.MLP(8, 4, 16, 1, key=KEY),
        "conv": eqx.nn.Conv2d(4, 6, (3, 2), groups=2, key=KEY),
        "up": eqx.nn.ConvTranspose1d(6, 2, 2, stride=2, key=KEY),
        "gru": eqx.nn.GRUCell(4, 8, key=KEY),
        "lstm": eqx.nn.LSTMCell(4, 8, key=KEY),
        "norms": [eqx.nn.LayerNorm(8), eqx.nn.RMSNorm(8), eqx.nn.GroupNorm(2, 8)],
        "scale": 2.0,
    }
    found = reading.geometry(model, W, per_head=per_head, embedding=EmbeddingRows())
    heads = Layout(out_blocks=4 if per_head else 1)
    wanted = {
        "embed/weight": EmbeddingRows(),
        **{f"attention/{x}_proj/weight": LaidOut(W, heads) for x in ("query", "key", "value")},
        "attention/output_proj/weight": LaidOut(W, Layout(in_blocks=4 if per_head else 1)),
        **{f"mlp/layers/{i}/weight": LaidOut(W, Layout()) for i in (0, 1)},
        "conv/weight": W.with_axes((-3, -2, -1), -4, out_blocks=2),
        "up/weight": W.with_axes(-2, (-3, -1)),
        **{f"gru/weight_{x}h": LaidOut(W, Layout(out_blocks=3)) for x in "ih"},
        **{f"lstm/weight_{x}h": LaidOut(W, Layout(out_blocks=4)) for x in "ih"},
    }
    assert {path: x for path, x in found.items() if x is not None} == wanted


def test_frozen_leaves_are_skipped_in_stacks():
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 4, key=key))(jax.random.split(KEY, 5))
    frozen = eqx.tree_at(lambda m: m.bias, stacked, None)
    assert reading.geometry(frozen, W) == {"weight": W.stacked()}
    found = reading.geometry({"a": [stacked]}, W)
    assert set(found) == {"a/0/weight", "a/0/bias"}


class Own(eqx.Module):
    """A parameter of an unknown module type."""

    table: Any


def test_parameters_of_unknown_modules_are_refused():
    model = eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=KEY), Own(jnp.ones((4, 2)))])
    with pytest.raises(TypeError, match=r"'layers/1/table' \(of Own\); overrides={'layers/1/tab"):
        reading.geometry(model, W)
    found = reading.geometry(model, W, overrides={"layers/1/table": EmbeddingRows()})
    assert found["layers/1/table"] == EmbeddingRows()
    with pytest.raises(TypeError, match=r"do not say what these are: 'w'; overrides={'w'"):
        reading.geometry({"w": jnp.ones((3, 2))}, W)
