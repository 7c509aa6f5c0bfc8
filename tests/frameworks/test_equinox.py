"""Geometries of Equinox models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import EmbeddingRows, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar

eqx: Any = pytest.importorskip("equinox")
reading = pytest.importorskip("manifoldmuon.frameworks.equinox")

W = Stiefel(solver=ProjectedPolar())
KEY = jax.random.key(0)


class Net(eqx.Module):
    """A model with each kind of module."""

    embed: Any
    attention: Any
    mlp: Any
    conv: Any
    up: Any
    gru: Any
    lstm: Any
    norms: list[Any]
    scale: float = 2.0

    def __init__(self):
        self.embed = eqx.nn.Embedding(9, 8, key=KEY)
        self.attention = eqx.nn.MultiheadAttention(4, 8, use_query_bias=True, key=KEY)
        self.mlp = eqx.nn.MLP(8, 4, 16, 1, key=KEY)
        self.conv = eqx.nn.Conv2d(4, 6, (3, 2), groups=2, key=KEY)
        self.up = eqx.nn.ConvTranspose1d(6, 2, 2, stride=2, key=KEY)
        self.gru = eqx.nn.GRUCell(4, 8, key=KEY)
        self.lstm = eqx.nn.LSTMCell(4, 8, key=KEY)
        self.norms = [eqx.nn.LayerNorm(8), eqx.nn.RMSNorm(8), eqx.nn.GroupNorm(2, 8)]


@pytest.mark.parametrize("per_head", [False, True])
def test_module_types_get_expected_manifolds(per_head):
    model = Net()
    found = reading.geometry(model, W, per_head=per_head, embedding=EmbeddingRows())
    heads = Layout(out_blocks=4 if per_head else 1)
    wanted = {
        "embed/weight": EmbeddingRows(),
        **{
            f"attention/{name}_proj/weight": LaidOut(W, heads) for name in ("query", "key", "value")
        },
        "attention/output_proj/weight": LaidOut(W, Layout(in_blocks=4 if per_head else 1)),
        "mlp/layers/0/weight": LaidOut(W, Layout()),
        "mlp/layers/1/weight": LaidOut(W, Layout()),
        "conv/weight": W.with_axes((-3, -2, -1), -4, out_blocks=2),
        "up/weight": W.with_axes(-2, (-3, -1)),
        **{f"gru/weight_{x}h": LaidOut(W, Layout(out_blocks=3)) for x in "ih"},
        **{f"lstm/weight_{x}h": LaidOut(W, Layout(out_blocks=4)) for x in "ih"},
    }
    assert {path: x for path, x in found.items() if x is not None} == wanted


def test_transposed_convolution_layout_matches_jacobian():
    module = Net().up
    entry = reading.geometry(module, W)["weight"]
    found = entry.layout.inward(np.asarray(module.weight))
    slope = jax.jacobian(module)(jnp.zeros((6, 1)))
    wanted = np.asarray(slope).reshape(-1, 6)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.linalg.svd(found)[1], np.linalg.svd(wanted)[1], atol=1e-5)


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
    with pytest.raises(
        TypeError, match=r"'layers/1/table' \(of Own\); overrides={'layers/1/table'"
    ):
        reading.geometry(model, W)
    found = reading.geometry(model, W, overrides={"layers/1/table": EmbeddingRows()})
    assert found["layers/1/table"] == EmbeddingRows()
    with pytest.raises(TypeError, match=r"do not say what these are: 'w'; overrides={'w'"):
        reading.geometry({"w": jnp.ones((3, 2))}, W)
