"""Geometries of Flax Linen models."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Stiefel

nn: Any = pytest.importorskip("flax.linen")
reading = pytest.importorskip("manifoldmuon.frameworks.linen")

W = Stiefel()
TOKENS = jax.ShapeDtypeStruct((2, 5), jnp.int32)


class Block(nn.Module):
    """Attention and a layer, with the signature that `nn.scan` expects."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(4, name="attention")(nn.RMSNorm()(x))
        return x + nn.Dense(8)(x), None


class Net(nn.Module):
    """A model with each kind of module."""

    @nn.compact
    def __call__(self, tokens, train):
        assert train is True
        embed = nn.Embed(9, 8, name="embed")
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="blocks")(embed(tokens), None)
        x = nn.RNN(nn.OptimizedLSTMCell(8, name="lstm"))(x)
        x = nn.RNN(nn.GRUCell(8, name="gru"))(x)
        x = nn.ConvTranspose(6, (2,), name="up")(nn.Conv(8, (3,), name="conv")(x))
        x = nn.Einsum((6, 2, 4), "btd,dhk->bthk", name="einsum")(x)
        x = nn.DenseGeneral((3, 4), axis=(-2, -1), name="general")(x)
        return nn.BatchNorm(not train)(nn.remat(nn.Dense)(8, name="dense")(x))


@pytest.mark.parametrize("per_head", [False, True])
def test_module_types_get_expected_manifolds(per_head):
    given = {"per_head": per_head, "embedding": EmbeddingRows(), "options": {"train": True}}
    found = reading.geometry(Net(), (TOKENS,), W, **given)
    assert reading.geometry(Net(), (TOKENS, True), W, **given | {"options": None}) == found
    kernel = W.transposed()
    heads, out = W.with_axes(-3, (-2, -1)), W.with_axes((-3, -2), -1)
    if per_head:
        heads, out = W.with_axes(-3, -1), kernel.stacked()
    attention = "blocks/attention"
    wanted = {
        "embed/embedding": EmbeddingRows(),
        **{f"{attention}/{x}/kernel": heads.stacked() for x in ("query", "key", "value")},
        f"{attention}/out/kernel": out.stacked(),
        "blocks/Dense_0/kernel": kernel.stacked(),
        **{f"lstm/{x}{y}/kernel": kernel for x in "ih" for y in "ifgo"},
        **{f"gru/{x}{y}/kernel": kernel for x in "ih" for y in "rzn"},
        "conv/kernel": W.with_axes((-3, -2), -1),
        "up/kernel": W.with_axes(-2, (-3, -1)),
        "einsum/kernel": W.with_axes(0, (1, 2)),
        "general/kernel": W.with_axes((-4, -3), (-2, -1)),
        "dense/kernel": kernel,
    }
    assert {path: x for path, x in found.items() if x is not None} == wanted
    shapes = jax.eval_shape(lambda x: Net().init(jax.random.key(0), x, True), TOKENS)
    rows = optim.tabulate({"params": found}, {"params": shapes["params"]}).rows
    assert {row.path for row in rows} == {f"params/{path}" for path in found}


def test_partitioned_parameters_keep_plain_paths():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
    found = reading.geometry(nn.Dense(4, kernel_init=init), (jnp.ones(3),), W)
    assert found == {"kernel": W.transposed(), "bias": None}


class Own(nn.Module):
    """A parameter of an unknown module type."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.ones, (8, 3))


def test_parameters_of_unknown_modules_are_refused():
    model, x = nn.Sequential([nn.Dense(8), Own()]), jnp.ones(4)
    with pytest.raises(TypeError, match=r"'layers_1/w' \(of Own\); overrides={'layers_1/w'"):
        reading.geometry(model, (x,), W)
    found = reading.geometry(model, (x,), W, overrides={Own: W.transposed()})
    assert found["layers_1/w"] == found["layers_0/kernel"] == W.transposed()


class Adapted(nn.Module):
    """Keeps its own parameter beside those of its layer, as in Flax's documentation."""

    def setup(self):
        self.layer = nn.Dense(3)
        nn.share_scope(self, self.layer)
        self.own = self.param("own", nn.initializers.ones, (4, 3))

    def __call__(self, x):
        return self.layer(x) + x @ self.own


def test_layer_with_a_shared_scope_is_read():
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match="what these are: 'own' "):
        reading.geometry(Adapted(), (x,), W)
    found = reading.geometry(Adapted(), (x,), W, overrides={Adapted: {"own": W.transposed()}})
    assert found == {"bias": None, "kernel": W.transposed(), "own": W.transposed()}
