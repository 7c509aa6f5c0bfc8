"""`frameworks.muon.geometry` on dimension numbers as MaxText writes them."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from optax.contrib import MuonDimensionNumbers as Numbers

from manifoldmuon import optim
from manifoldmuon.frameworks.muon import geometry
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, LaidOut, Stiefel
from manifoldmuon.norms import Spectral
from tests.optim.training import drawn

# The four tables of MaxText 0.2.5 (`maxtext.utils.muon_utils`). Scanned layers are the second axis.
PLAIN, EXPERTS = Numbers((0,), (-1,)), Numbers((-2,), (-1,))
HEADS, OUT = Numbers((0,), (-2, -1)), Numbers((0, -2), (-1,))
# Parameters by model: shape, numbers, and copies, fan-out and fan-in by the model's architecture.
MODELS: dict[str, dict[str, tuple[tuple[int, ...], Any, tuple[int, int, int] | None]]] = {
    "llama2-7b": {
        "layers/mlp/wi_0/kernel": ((4096, 32, 11008), PLAIN, (32, 11008, 4096)),
        "layers/mlp/wo/kernel": ((11008, 32, 4096), PLAIN, (32, 4096, 11008)),
        "layers/self_attention/query/kernel": ((4096, 32, 32, 128), HEADS, (32, 4096, 4096)),
        "layers/self_attention/out/kernel": ((32, 32, 128, 4096), OUT, (32, 4096, 4096)),
        "layers/pre_self_attention_layer_norm/scale": ((4096, 32), None, None),
        "logits_dense/kernel": ((4096, 32000), None, None),
    },
    "gemma3-4b": {
        "layers/layers_0/self_attention/key/kernel": ((2560, 5, 4, 256), HEADS, (5, 1024, 2560)),
        "layers_remainder/layers_0/mlp/wi_0/kernel": ((2560, 10240), PLAIN, (1, 10240, 2560)),
        "layers_remainder/layers_0/self_attention/query/kernel": (
            (2560, 8, 256), HEADS, (1, 2048, 2560),
        ),
        "layers_remainder/layers_0/self_attention/out/kernel": (
            (8, 256, 2560), OUT, (1, 2560, 2048),
        ),
    },
    "qwen3-next-80b-a3b": {  # three of four layers in a scan within the scan
        "layers/local_layers/attention/in_proj_qkvz/kernel": (
            (2048, 12, 3, 12288), PLAIN, (36, 12288, 2048),
        ),
        "layers/local_layers/mlp/routed_experts/wi_0": (
            (512, 12, 3, 2048, 512), EXPERTS, (512 * 36, 512, 2048),
        ),
    },
    "gpt-oss-20b": {
        "layers/layers_0/GptOssAttention/out/kernel": ((64, 12, 64, 2880), OUT, (12, 2880, 4096)),
        "layers/layers_0/GptOssMlp/wo": ((32, 12, 2880, 2880), EXPERTS, (32 * 12, 2880, 2880)),
        "layers/layers_0/GptOssMlp/wo_bias": ((32, 12, 2880), None, None),
    },
    "deepseek2-16b": {
        "dense_layers/self_attention/wkv_a/kernel": ((2048, 1, 576), PLAIN, (1, 576, 2048)),
    },
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_maxtext_tables_give_matrices_of_architecture(model):
    rows = MODELS[model]
    numbers = unflatten_dict({path: numbers for path, (_, numbers, _) in rows.items()}, sep="/")
    shapes = {path: jax.ShapeDtypeStruct(row[0], jnp.float32) for path, row in rows.items()}
    entries: Any = optim.resolve_geometry(
        geometry(numbers, Stiefel()), unflatten_dict(shapes, sep="/")
    )
    found: Any = flatten_dict(entries, sep="/")
    for path, (shape, _, expected) in rows.items():
        if expected is None:
            assert found[path] is None
            continue
        assert found[path].manifold == Stiefel()
        assert found[path].ndim == len(shape)  # no axis is left to be taken for undeclared copies
        *copies, fan_out, fan_in = found[path].layout.inner_shape(shape)
        assert (math.prod(copies), fan_out, fan_in) == expected


def test_matrices_are_those_of_layers_heads_and_experts():
    shapes = {"query": (6, 3, 2, 4), "out": (2, 3, 4, 6), "wo": (5, 3, 4, 6), "mlp": (6, 3, 7)}
    numbers = {"query": HEADS, "out": OUT, "wo": EXPERTS, "mlp": PLAIN}
    params: Any = drawn(40, shapes)
    entries = optim.resolve_geometry(geometry(numbers, Stiefel()), params)
    inner = {name: np.asarray(entries[name].layout.inward(x)) for name, x in params.items()}
    params = jax.tree.map(np.asarray, params)
    for layer in range(3):
        heads, out = params["query"][:, layer], params["out"][:, layer]
        np.testing.assert_array_equal(inner["query"][layer], heads.reshape(6, 8).T)
        np.testing.assert_array_equal(inner["out"][layer], out.reshape(8, 6).T)
        np.testing.assert_array_equal(inner["mlp"][layer], params["mlp"][:, layer].T)
    for expert, layer in itertools.product(range(5), range(3)):
        expected = params["wo"][expert, layer].T
        np.testing.assert_array_equal(inner["wo"][expert, layer], expected)


@pytest.mark.slow_except("prefix")
@pytest.mark.parametrize(
    "numbers", [None, Numbers(), {"mlp": Numbers()}], ids=["none", "numbers", "prefix"]
)
def test_defaults_and_prefixes_match_optax(numbers):
    params = drawn(41, {"mlp": {"wi": (6, 8), "wo": (8, 6)}})
    grads = drawn(42, {"mlp": {"wi": (6, 8), "wo": (8, 6)}})
    converging: Any = {"ns_coeffs": (15 / 8, -5 / 4, 3 / 8), "ns_steps": 40, "nesterov": False}
    theirs = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers, **converging)
    wanted, _ = jax.jit(lambda g, p: theirs.update(g, theirs.init(p), p))(grads, params)
    tx = optim.scale_by_steepest(geometry(numbers, Euclidean(Spectral())))
    steps, _ = tx.update(grads, tx.init(params), params)
    for step, update in zip(*map(jax.tree.leaves, (steps, wanted)), strict=True):
        step, update = (np.asarray(x) / np.linalg.norm(x) for x in (step, update))
        np.testing.assert_allclose(step, -update, atol=1e-4)


def test_rest_is_for_parameters_without_numbers():
    rows = EmbeddingRows()
    spaces = geometry({"embedding": None, "mlp": PLAIN}, Stiefel(), rest=rows)
    entries: Any = optim.resolve_geometry(spaces, drawn(43, {"embedding": (5, 3), "mlp": (4, 3)}))
    assert entries["embedding"] == rows
    assert isinstance(entries["mlp"], LaidOut)
    default: Any = optim.resolve_geometry(geometry(None, Stiefel()), {"bias": jnp.ones(3)})
    assert default["bias"] is None


def test_nnx_state_of_numbers_describes_parameters():
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Param)
    tables = nnx.State({"kernel": PLAIN, "bias": None})
    entries = optim.resolve_geometry(geometry(tables, Stiefel()), params)
    assert entries["kernel"].get_value().layout.inner_shape((3, 4)) == (4, 3)
    assert entries["bias"].get_value() is None
