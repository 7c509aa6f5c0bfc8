"""Geometries of Haiku models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.manifolds import EmbeddingRows, LaidOut, Stiefel

hk: Any = pytest.importorskip("haiku")
reading = pytest.importorskip("manifoldmuon.frameworks.haiku")

W = Stiefel()


class Own(hk.Module):
    """A parameter of an unknown module type."""

    def __call__(self, x):
        return x @ hk.get_parameter("table", (8, 3), init=jnp.ones)


def network(tokens, train):
    """Apply each kind of module."""
    assert train is True
    x = hk.Embed(9, 8)(tokens)
    x = hk.LayerNorm(-1, True, True)(x)
    x = hk.BatchNorm(True, True, 0.9)(hk.MultiHeadAttention(4, 2, w_init=jnp.zeros)(x, x, x), train)
    x, _ = hk.GRU(8)(x[:, 0], jnp.zeros((2, 8)))
    cell = hk.LSTM(8)
    x, _ = cell(x, cell.initial_state(2))
    x = hk.Conv1DTranspose(8, 2)(hk.Conv1D(8, 3)(x[:, None]))
    return Own()(hk.nets.MLP([16, 8])(x))


TOKENS = jax.ShapeDtypeStruct((2, 5), jnp.int32)


@pytest.mark.parametrize("per_head", [False, True])
def test_module_types_get_expected_manifolds(per_head):
    model = hk.transform_with_state(network)
    given: Any = {
        "options": {"train": True},
        "embedding": EmbeddingRows(),
        "overrides": {Own: None},
    }
    found = reading.geometry(model, (TOKENS,), W, per_head=per_head, **given)
    count, kernel = 4 if per_head else 1, W.transposed()
    attention = "multi_head_attention"
    wanted = {
        "embed/embeddings": EmbeddingRows(),
        **{
            f"{attention}/{name}/w": W.with_axes(-2, -1, out_blocks=count)
            for name in ("query", "key", "value")
        },
        f"{attention}/linear/w": W.with_axes(-2, -1, in_blocks=count),
        "gru/w_i": W.with_axes(-2, -1, out_blocks=3),
        "gru/w_h": W.with_axes(-2, -1, out_blocks=3),
        "lstm/linear/w": W.with_axes(-2, -1, out_blocks=4),
        "conv1_d/w": W.with_axes((-3, -2), -1),
        "conv1_d_transpose/w": W.with_axes(-1, (-3, -2)),
        "mlp/~/linear_0/w": kernel,
        "mlp/~/linear_1/w": kernel,
    }
    assert {path: x for path, x in found.items() if x is not None} == wanted
    assert all(isinstance(x, LaidOut) for path, x in wanted.items() if "embed" not in path)


def test_parameters_of_unknown_modules_are_refused():
    model = hk.transform(lambda x: Own()(x))
    with pytest.raises(
        TypeError, match=r"'own/table' \(of Own\); overrides={'own/table': manifold"
    ):
        reading.geometry(model, (jnp.ones(8),), W)
