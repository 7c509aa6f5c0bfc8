"""Guesses at mistakes in a geometry: what is reported, and what is not."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from manifoldmuon import optim
from manifoldmuon.contrib import lint
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, Hypersphere, LaidOut, Layout, Stiefel
from manifoldmuon.modules import gpt, mlp
from manifoldmuon.norms import ConvRMSToRMS, Frobenius, RMSToRMS
from tests.optim.instances import abstract

W, FLAX, VECTOR = Stiefel(), Stiefel().transposed(), Euclidean()
MUON = Euclidean(RMSToRMS())


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2, qkv_features=16, out_features=16)(x)
        return x + nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class Sound(nn.Module):
    """A bit of everything, scanned layers and fused heads included."""

    @nn.compact
    def __call__(self, tokens, images):
        table = nn.Embed(50, 16)
        patches = nn.Conv(16, (3, 3), name="patch_embed")(nn.Conv(8, (5, 5))(images))
        x = table(tokens) + patches.mean((1, 2))[:, None]
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return table.attend(nn.LayerNorm()(layers()(x, None)[0]))


def test_a_sound_geometry_has_no_warnings():
    tokens, images = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 8, 8, 3))
    params = jax.eval_shape(Sound().init, jax.random.key(0), tokens, images)
    geometry = optim.by_path(
        {
            "**/embedding": EmbeddingRows(),
            "**/Conv_0/kernel": Euclidean(ConvRMSToRMS()).with_axes(-2, -1, (-4, -3)),
            "**/patch_embed/kernel": Stiefel().with_axes((0, 1, 2), 3),
            re.compile(".*/(query|key|value)/kernel"): Stiefel().with_axes(-3, (-2, -1)),
            "**/out/kernel": Stiefel().with_axes((-3, -2), -1),
            "**/kernel": FLAX,
            "**": VECTOR,
        }
    )
    assert lint(geometry, params) == []
    rows = optim.tabulate(geometry, params).rows
    copies = {row.path.rpartition("ScanLayer_0/")[2]: row.copies for row in rows}
    assert copies["Dense_0/kernel"] == copies["LayerNorm_0/scale"] == 3
    assert copies["MultiHeadDotProductAttention_0/query/kernel"] == 3


def test_convolutions_with_biases_for_each_place_are_no_stacks():
    """Equinox's have shapes such as (4, 3, 5, 5) and (4, 1, 1)."""
    convolution = W.with_axes((-3, -2, -1), -4)
    geometry = {"weight": convolution, "bias": Euclidean(Frobenius(ndim=3))}
    for lead in ((), (6,)):  # one, and six that are scanned
        shapes = {"weight": (*lead, 4, 3, 5, 5), "bias": (*lead, 4, 1, 1)}
        table = optim.tabulate(geometry, abstract(shapes))
        assert lint(geometry, abstract(shapes)) == []
        assert {row.copies for row in table.rows} == {*(lead or (1,))}
    assert lint(W.with_axes((1, 2), 0), abstract({"weight": (4, 3, 5)})) == []


def test_the_bias_of_a_fused_projection_fits():
    """One vector for all blocks of a layer; a stack of layers has one for each."""
    shapes = {"kernel": (8, 24), "bias": (24,)}
    geometry = {"kernel": LaidOut(W, Layout(-2, -1, out_blocks=6)), "bias": VECTOR}
    stack = {name: (3, *shape) for name, shape in shapes.items()}
    for params in (shapes, stack):
        assert lint(geometry, abstract(params)) == []


@pytest.mark.parametrize(
    ("entry", "kernel", "bias"),
    [
        (FLAX, (8, 4), (2, 3, 4)),  # a bias for each place
        (W.with_axes(-2, (-3, -1)), (5, 8, 4), (3, 5, 4)),
        (W.with_axes((0, 1), (2, 3, 4)), (2, 3, 2, 3, 4), (2, 3, 4)),  # both begin with 2
    ],
)
def test_a_bias_that_says_nothing_of_the_kernel(entry, kernel, bias):
    """The first two fit no choice of axes; in the last the bias of a stack would have four axes."""
    shapes = abstract({"kernel": kernel, "bias": bias})
    assert lint({"kernel": entry, "bias": None}, shapes) == []


@pytest.mark.parametrize("network", [mlp(10, 64, 32, 3), gpt(256, 32, 2, 2)])
def test_an_architecture_is_sound(network):
    params = jax.eval_shape(network.init, jax.random.key(0))
    table = optim.tabulate(network.geometry(), params, network.budgets())
    assert lint(network.geometry(), params) == []
    budgets = [float(jnp.max(jnp.asarray(row.budget))) for row in table.rows]
    assert 0 < max(budgets) <= 1


SCANNED = {"kernel": (3, 4, 8), "bias": (3, 8)}
WRONG = {
    "an embedding on Stiefel": (
        {"embed": {"embedding": (9, 4)}}, {"embed": W}, "embed/embedding: .*Use EmbeddingRows"
    ),
    "an embedding under a spectral norm": (
        {"wte": (9, 4)}, {"wte": MUON}, "flat space with a spectral norm"
    ),
    "a stack whose layers are counted into the fan-in": (
        {"block": SCANNED},
        {"block": {"kernel": W.with_axes((0, 1), 2), "bias": VECTOR}},
        "axis 0 looks like a stack of 3 layers, but it is counted into the fan-in",
    ),
    "a stack whose layers are counted into the fan-out": (
        {"block": SCANNED},
        {"block": {"kernel": W.with_axes(1, (0, 2)), "bias": VECTOR}},
        "counted into the fan-out",
    ),
    "a stack on one sphere": (
        {"block": SCANNED},
        {"block": {"kernel": Hypersphere(ndim=3), "bias": VECTOR}},
        "counted into the weight, so that the stack is seen as one matrix",
    ),
    "fused heads read as a stack": (
        {"query": {"kernel": (32, 4, 8)}},
        FLAX,
        "32 copies of a matrix of fan-in 4 and fan-out 8: the axis of length 32 looks like a fan",
    ),
    "a convolution of PyTorch's layout read as a stack": (
        {"conv": {"weight": (16, 8, 3, 3)}}, W, "128 copies of a matrix of fan-in 3 and fan-out 3"
    ),
    "a Flax kernel read as (out, in)": (
        {"dense": {"kernel": (4, 8), "bias": (8,)}},
        {"dense": {"kernel": W, "bias": VECTOR}},
        "the fan-out is 4, but the bias beside it has shape (8,)",
    ),
    "heads read as a stack, beside their bias": (
        {"query": {"kernel": (6, 2, 8), "bias": (2, 8)}},
        {"query": {"kernel": FLAX, "bias": VECTOR}},
        "the fan-out is 8, but the bias beside it has shape (2, 8)",
    ),
    "a bias for each place of an image, read as numbers": (
        {"conv": {"weight": (4, 3, 5, 5), "bias": (4, 1, 1)}},
        {"conv": {"weight": W.with_axes((1, 2, 3), 0), "bias": VECTOR}},
        "takes each of its 4 entries for a weight by itself. Count its axes: Euclidean(",
    ),
    "a matrix without a norm": (
        {"dense": {"kernel": (4, 8)}}, VECTOR, "takes each of its 4 rows for a weight by itself"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_suspicious_entries_get_one_sentence(name):
    shapes, geometry, message = WRONG[name]
    (warning,) = lint(geometry, abstract(shapes))
    assert re.search(message if ".*" in message else re.escape(message), warning)


BARE = {
    "layers of two shapes": ({"up": (3, 8, 16), "down": (3, 16, 8)}, True),
    "square layers": ({"a": (3, 8, 8), "c": (3, 8, 8)}, True),
    "of PyTorch's images": ({"a": (16, 3, 5, 5), "c": (16, 8, 5, 5)}, False),
    "taps by name": ({"conv1": (3, 8, 16), "conv2": (3, 16, 16)}, False),
    "taps by their number": ({"a": (3, 3, 8, 16), "c": (3, 3, 16, 8)}, False),
    "fused heads": ({"query": (16, 2, 8), "key": (16, 2, 8), "out": (2, 8, 16)}, False),
    "fused heads of one shape": ({"query": (16, 4, 4), "key": (16, 4, 4)}, False),
}


@pytest.mark.parametrize("name", BARE)
def test_a_stack_without_biases_that_is_seen_as_one_matrix(name):
    kernels, stacked = BARE[name]
    shapes = abstract({"layers": kernels})
    rank = len(next(iter(kernels.values())))
    whole = W.with_axes(tuple(range(rank - 1)), rank - 1)
    warnings = lint(whole, shapes)
    assert len(warnings) == (2 if stacked else 0)
    assert all("axis 0 looks like a stack of 3 layers" in warning for warning in warnings)
    # Seen as layers it is sound.
    assert not stacked or lint(FLAX, shapes) == []
