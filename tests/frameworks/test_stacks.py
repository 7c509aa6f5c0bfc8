"""Modules stacked along any axis: each copy is a separate matrix."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon.frameworks import equinox as equinox_reader
from manifoldmuon.frameworks import linen as linen_reader
from manifoldmuon.frameworks import nnx as nnx_reader
from manifoldmuon.manifolds import EmbeddingRows, Stiefel

COPIES = 8


def nnx_stack(make: Any, axis: int) -> Any:
    transform = nnx.vmap(make, in_axes=0, out_axes=nnx.StateAxes({...: axis}))
    return transform(jax.random.split(jax.random.key(0), COPIES))


def equinox_stack(make: Any, axis: int) -> Any:
    keys = jax.random.split(jax.random.key(0), COPIES)
    return eqx.filter_vmap(make, out_axes=axis)(keys)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(3, name="down")(nn.Dense(5, name="up")(x)), None


def projected(model: Any) -> Any:
    """Return the weights of an Equinox model, projected on their manifolds."""
    geometry = equinox_reader.geometry(model, Stiefel())
    return optim.project_tree(geometry, eqx.filter(model, eqx.is_array))


def check_copies(kernel: Any, axis: int, *shape: int, size: float = 1.0) -> None:
    """Check the singular values of every copy, in matrices of this shape."""
    copies = np.moveaxis(np.asarray(kernel, np.float64), axis, 0)
    copies = copies.reshape(COPIES, *shape) if shape else copies
    np.testing.assert_allclose(np.linalg.svd(copies, compute_uv=False), size, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_nnx_stack_on_any_axis_constrains_each_copy(axis):
    model = nnx_stack(lambda key: nnx.Linear(3, 5, rngs=nnx.Rngs(params=key)), axis)
    geometry = nnx_reader.geometry(model, Stiefel())
    check_copies(optim.project_tree(geometry, nnx.state(model, nnx.Param))["kernel"][...], axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_linen_scan_on_any_axis_constrains_each_copy(axis):
    given: Any = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
    model, arguments = nn.scan(Layer, length=COPIES, **given)(), (jnp.ones(3), None)
    params = model.init(jax.random.key(0), *arguments)["params"]
    moved = optim.project_tree(linen_reader.geometry(model, arguments, Stiefel()), params)
    for name in ("up", "down"):
        check_copies(moved[name]["kernel"], axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_equinox_stack_on_any_axis_constrains_each_copy(axis):
    model = equinox_stack(lambda key: eqx.nn.Linear(3, 5, use_bias=False, key=key), axis)
    check_copies(projected(model).weight, axis)


def test_convolution_stack_on_later_axis_keeps_taps():
    model = equinox_stack(lambda key: eqx.nn.Conv2d(2, 4, 3, use_bias=False, key=key), 2)
    check_copies(projected(model).weight, 2, 4, -1)


@pytest.mark.slow_except("GRUCell-1")
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", [eqx.nn.LSTMCell, eqx.nn.GRUCell])
def test_gates_of_stacked_cells_are_matrices(kind, axis):
    model = equinox_stack(lambda key: kind(3, 5, use_bias=False, key=key), axis)
    check_copies(projected(model).weight_ih, axis, -1, 5, 3)


def test_adapters_stacked_on_later_axis_are_refused():
    """The module does not know its rank."""

    def adapters(axis):
        return nnx_stack(lambda key: nnx.LoRA(6, 2, 5, rngs=nnx.Rngs(params=key)), axis)

    model = adapters(0)
    geometry = nnx_reader.lora_geometry(model)
    moved = optim.project_tree(geometry, nnx.state(model, nnx.LoRAParam))["lora_a"][...]
    check_copies(moved, 0, size=(2 / 6) ** 0.5)
    with pytest.raises(ValueError, match=r"'lora_a' has shape \(6, 8, 2\); a single copy"):
        nnx_reader.lora_geometry(adapters(1))
    assert nnx_reader.geometry(adapters(1), Stiefel()) == {"lora_a": None, "lora_b": None}


def test_first_of_several_possible_stack_axes_is_taken_with_a_warning():
    model = equinox_stack(lambda key: eqx.nn.Linear(8, 8, use_bias=False, key=key), 0)
    with pytest.warns(UserWarning, match="'weight' has shape .* the first axis is taken"):
        moved = projected(model)
    check_copies(moved.weight, 0)


def test_ambiguous_stack_axis_is_refused():
    """Eight copies of a (3, 8) kernel: the last two axes are indistinguishable."""
    model = equinox_stack(lambda key: eqx.nn.Linear(8, 3, use_bias=False, key=key), 1)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 8, 8\); a single copy"):
        equinox_reader.geometry(model, Stiefel())


def test_embedding_stack_on_later_axis_is_refused():
    model = nnx_stack(lambda key: nnx.Embed(3, 5, rngs=nnx.Rngs(params=key)), 1)
    with pytest.raises(ValueError, match=r"'embedding' has shape \(3, 8, 5\)"):
        nnx_reader.geometry(model, Stiefel(), embedding=EmbeddingRows())
