"""Geometries of Flax NNX models, against the Jacobians of their modules."""

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import EmbeddingRows, Euclidean, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS

nnx = pytest.importorskip("flax.nnx")
reading = pytest.importorskip("manifoldmuon.frameworks.nnx")

MATRIX = Stiefel(solver=ProjectedPolar())
FLAT = Euclidean(RMSToRMS())


def rngs() -> Any:
    return nnx.Rngs(0)


KNOWN = inspect.signature(nnx.MultiHeadAttention).parameters
GROUPED: Any = {"num_kv_heads": 2} if "num_kv_heads" in KNOWN else {}  # not in Flax 0.12.1


def attention(**options: Any) -> Any:
    return nnx.MultiHeadAttention(4, 8, **GROUPED, decode=False, rngs=rngs(), **options)


def jacobian(function: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the matrix of a linear map of an array, by differentiation."""
    slope = jax.jacobian(function)(jnp.zeros(shape))
    return np.asarray(slope, np.float64).reshape(-1, np.prod(shape))


def same_maps(entry: Any, kernel: Any, wanted: Any) -> None:
    """Compare shapes and singular values; the order of rows and columns is irrelevant."""
    inner = entry.layout.inward(np.asarray(kernel[...], np.float64))
    found = inner.reshape(-1, *inner.shape[-2:])
    assert found.shape == (len(wanted), *wanted[0].shape)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.linalg.svd(a)[1], np.linalg.svd(b)[1], atol=1e-5)


def check_kernel(module: Any, wanted: Any) -> None:
    same_maps(reading.geometry(module, MATRIX)["kernel"], module.kernel, wanted)


def linear_maps() -> Any:
    valid: Any = {"padding": "VALID", "rngs": rngs()}
    flipped: Any = valid | {"transpose_kernel": True}
    return {
        "Linear": (nnx.Linear(3, 5, rngs=rngs()), (3,)),
        "LinearGeneral": (nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs()), (2, 3)),
        "Einsum": (nnx.Einsum("nta,hab->nthb", (8, 2, 4), rngs=rngs()), (1, 1, 2)),
        "Conv": (nnx.Conv(2, 5, (3, 2), **valid), (3, 2, 2)),
        "ConvTranspose": (nnx.ConvTranspose(6, 2, (2, 2), (2, 2), **valid), (1, 1, 6)),
        "ConvTranspose, flipped": (nnx.ConvTranspose(6, 2, (2, 3), (2, 3), **flipped), (1, 1, 6)),
    }


@pytest.mark.parametrize("name", linear_maps())
def test_kernel_layouts_match_jacobians(name):
    module, shape = linear_maps()[name]
    check_kernel(module, [jacobian(module, shape)])


def test_shared_einsum_axes_are_copies():
    module = nnx.Einsum("ea,eab->eb", (3, 2, 4), rngs=rngs())
    whole = jacobian(module, (3, 2)).reshape(3, 4, 3, 2)
    check_kernel(module, [whole[i, :, i] for i in range(3)])


def test_convolution_groups_are_separate_matrices():
    module = nnx.Conv(4, 6, (3,), padding="VALID", feature_group_count=2, rngs=rngs())
    whole = jacobian(module, (3, 4)).reshape(2, 3, 3, 2, 2)
    check_kernel(module, [whole[g, :, :, g].reshape(3, 6) for g in range(2)])


@pytest.mark.parametrize("per_head", [False, True])
def test_attention_projection_layouts_match_jacobians(per_head):
    module = attention()
    found = reading.geometry(module, FLAT, attention=MATRIX, per_head=per_head)
    for name in ("query", "key", "value"):
        part = getattr(module, name)
        whole = jacobian(part, (8,))
        wanted = np.split(whole, part.kernel.shape[1]) if per_head else [whole]
        same_maps(found[f"{name}/kernel"], part.kernel, wanted)
    whole = jacobian(module.out, (4, 2))
    wanted = np.split(whole, 4, axis=1) if per_head else [whole]
    same_maps(found["out/kernel"], module.out.kernel, wanted)
    assert found["query/kernel"].manifold == MATRIX
    assert found["query/bias"] is None


def test_geometry_covers_all_parameters():
    layers = nnx.Embed(9, 8, rngs=rngs()), nnx.RMSNorm(8, rngs=rngs()), attention(normalize_qk=True)
    model = nnx.Sequential(*layers, nnx.Linear(8, 9, rngs=rngs()))
    head: Any = {"layers/3/kernel": None}
    geometry = reading.geometry(model, MATRIX, embedding=EmbeddingRows(), overrides=head)
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert set(geometry) == {"/".join(map(str, path)) for path, _ in leaves}
    read = {path for path, entry in geometry.items() if entry is not None}
    kernels = {f"layers/2/{name}/kernel" for name in ("query", "key", "value", "out")}
    assert read == kernels | {"layers/0/embedding"}


def test_recurrent_cells_split_by_gate():
    for cell, gates in ((nnx.GRUCell, 3), (nnx.OptimizedLSTMCell, 4)):
        found = reading.geometry(cell(2, 5, rngs=rngs()), MATRIX)
        assert found["dense_h/kernel"] == MATRIX.with_axes(-2, -1, out_blocks=gates)
        assert set(found.values()) == {found["dense_h/kernel"], None}
    for cell in (nnx.LSTMCell, nnx.SimpleCell):
        found = reading.geometry(cell(2, 5, rngs=rngs()), MATRIX)
        assert set(found.values()) == {MATRIX.transposed(), None}


class Own(nnx.Module):
    """A parameter of an unknown module type."""

    def __init__(self, rngs: Any):
        self.weight = nnx.Param(jnp.ones((3, 4)))
        self.inner = MyLinear(3, 4, rngs=rngs)


class MyLinear(nnx.Linear):
    """A subclass with an additional gain."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gain = nnx.Param(jnp.ones(()))


def test_parameters_of_unknown_modules_are_refused():
    model = nnx.Sequential(Own(rngs()))
    message = (
        r"'layers/0/inner/gain' \(of MyLinear\), 'layers/0/weight' \(of Own\);"
        r" overrides={'layers/0/inner/gain': manifold}, None .*{MyLinear: {'gain': manifold}}"
    )
    with pytest.raises(TypeError, match=message):
        reading.geometry(model, MATRIX)


def test_overrides_by_type_and_path():
    model = nnx.Sequential(Own(rngs()), nnx.Linear(3, 3, rngs=rngs()))
    known = {Own: {"weight": MATRIX}, MyLinear: {"gain": None}}
    found = reading.geometry(model, FLAT, overrides=known)
    assert found["layers/0/weight"] == MATRIX  # unknown type: no layout is applied
    assert found["layers/0/inner/kernel"] == found["layers/1/kernel"] == FLAT.transposed()
    more: Any = known | {"layers/1/*": None, nnx.Linear: MATRIX, "**/inner/bias": Euclidean()}
    found = reading.geometry(model, FLAT, overrides=more)
    assert found["layers/0/inner/kernel"] == MATRIX.transposed()
    assert found["layers/0/inner/bias"] == Euclidean()
    assert found["layers/1/kernel"] is found["layers/1/bias"] is None
    own = LaidOut(MATRIX, Layout(-2, -1, out_blocks=2))
    found = reading.geometry(model, FLAT, overrides=known | {"**/inner/kernel": own})
    assert found["layers/0/inner/kernel"] == own
    found = reading.geometry(model, FLAT, overrides={Own: None, nnx.Linear: None})
    assert set(found.values()) == {None}
    for unused in ({"nowhere": None}, {nnx.Conv: None}):
        with pytest.raises(ValueError, match=r"the overrides \['(nowhere|Conv)'\] match no para"):
            reading.geometry(model, FLAT, overrides=known | unused)


def test_lora_adapters_default_to_none():
    model = nnx.LoRALinear(4, 5, lora_rank=2, rngs=rngs())
    found = reading.geometry(model, MATRIX)
    assert found["lora/lora_a"] is found["lora/lora_b"] is None
    found = reading.geometry(model, MATRIX, overrides={nnx.LoRA: {"lora_a": MATRIX}})
    assert found["lora/lora_a"] == MATRIX.transposed()
    frozen = reading.geometry(model, MATRIX, wrt=nnx.LoRAParam)
    assert set(frozen) == {"lora/lora_a", "lora/lora_b"}


class Adapted(nnx.Module):
    """A layer with an adapter, and a stack of such layers."""

    def __init__(self):
        self.first = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs())

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stacked(rngs):
            return nnx.LoRALinear(8, 8, lora_rank=4, rngs=rngs)

        self.stack = stacked(rngs())


@pytest.mark.slow
def test_lora_step_is_of_the_rate_in_rms_norms():
    """`x @ lora_a @ lora_b`: the RMS-to-RMS norm of a factor (in, out) in NumPy."""

    def sizes(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return np.linalg.svd(x, compute_uv=False) * np.sqrt(x.shape[-2] / x.shape[-1])

    model = Adapted()
    spaces = reading.lora_geometry(model)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Not(nnx.LoRAParam)))
    nnx.update(model, optim.project_tree(spaces, nnx.state(model, nnx.LoRAParam)))
    tx = optim.manifold_muon(0.1, spaces)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    x = jax.random.normal(jax.random.key(1), (3, 5, 8))

    def loss(model):
        y = jax.vmap(lambda layer, x: layer(x))(model.stack, x)
        return jnp.sum(y**2) + jnp.sum(model.first(x[..., :6]) ** 2)

    nnx.jit(lambda m, o: o.update(m, nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(m)))(
        model, optimizer
    )
    for layer in (model.first, model.stack):
        np.testing.assert_allclose(sizes(layer.lora.lora_a[...]), 1, atol=1e-5)
        np.testing.assert_allclose(sizes(layer.lora.lora_b[...]).max(-1), 0.1, rtol=1e-3)
    chex.assert_trees_all_equal(nnx.state(model, nnx.Not(nnx.LoRAParam)), before)


def test_lora_geometry_refuses_other_models():
    with pytest.raises(ValueError, match=r"the overrides \['LoRA'\] match no parameter"):
        reading.lora_geometry(nnx.Linear(4, 5, rngs=rngs()))
    model = nnx.Linear(4, 5, rngs=rngs())
    model.kernel_lora_a = nnx.LoRAParam(jnp.ones((4, 2)))  # as Qwix does
    with pytest.raises(TypeError, match=r"do not say what these are: 'kernel_lora_a'"):
        reading.lora_geometry(model)
