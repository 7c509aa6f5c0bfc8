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


class Stack(nn.Module):
    axis: int

    @nn.compact
    def __call__(self, x):
        axes: Any = {"params": self.axis}
        scan = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=COPIES)
        return scan(name="layers")(x, None)[0]


def singular_values(kernel: Any, axis: int) -> np.ndarray:
    """Return the singular values of every copy."""
    copies = np.moveaxis(np.asarray(kernel, np.float64), axis, 0)
    return np.linalg.svd(copies, compute_uv=False)


@pytest.mark.parametrize("axis", [0, 1])
def test_nnx_stack_on_any_axis_constrains_each_copy(axis):
    model = nnx_stack(lambda key: nnx.Linear(3, 5, rngs=nnx.Rngs(params=key)), axis)
    geometry = nnx_reader.geometry(model, Stiefel())
    kernel = optim.project_tree(geometry, nnx.state(model, nnx.Param))["kernel"][...]
    np.testing.assert_allclose(singular_values(kernel, axis), 1, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_linen_scan_on_any_axis_constrains_each_copy(axis):
    model, x = Stack(axis), jnp.ones(3)
    params = model.init(jax.random.key(0), x)["params"]
    moved = optim.project_tree(linen_reader.geometry(model, (x,), Stiefel()), params)
    for name in ("up", "down"):
        found = singular_values(moved["layers"][name]["kernel"], axis)
        np.testing.assert_allclose(found, 1, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_equinox_stack_on_any_axis_constrains_each_copy(axis):
    model = equinox_stack(lambda key: eqx.nn.Linear(3, 5, use_bias=False, key=key), axis)
    moved = optim.project_tree(
        equinox_reader.geometry(model, Stiefel()), eqx.filter(model, eqx.is_array)
    )
    np.testing.assert_allclose(singular_values(moved.weight, axis), 1, atol=1e-5)


def test_convolution_stack_on_later_axis_keeps_taps():
    model = equinox_stack(lambda key: eqx.nn.Conv2d(2, 4, 3, use_bias=False, key=key), 2)
    geometry = equinox_reader.geometry(model, Stiefel())
    moved = optim.project_tree(geometry, eqx.filter(model, eqx.is_array))
    copies = np.moveaxis(np.asarray(moved.weight, np.float64), 2, 0).reshape(COPIES, 4, -1)
    np.testing.assert_allclose(np.linalg.svd(copies, compute_uv=False), 1, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", [eqx.nn.LSTMCell, eqx.nn.GRUCell])
def test_gates_of_stacked_cells_are_matrices(kind, axis):
    model = equinox_stack(lambda key: kind(3, 5, use_bias=False, key=key), axis)
    params = eqx.filter(model, eqx.is_array)
    moved = optim.project_tree(equinox_reader.geometry(model, Stiefel()), params)
    copies = np.moveaxis(np.asarray(moved.weight_ih, np.float64), axis, 0)
    found = np.linalg.svd(copies.reshape(COPIES, -1, 5, 3), compute_uv=False)
    np.testing.assert_allclose(found, 1, atol=1e-5)


def test_adapters_stacked_on_later_axis_are_refused():
    """The module does not know its rank."""

    def adapters(axis):
        return nnx_stack(lambda key: nnx.LoRA(6, 2, 5, rngs=nnx.Rngs(params=key)), axis)

    model = adapters(0)
    geometry = nnx_reader.lora_geometry(model)
    moved = optim.project_tree(geometry, nnx.state(model, nnx.LoRAParam))["lora_a"][...]
    np.testing.assert_allclose(singular_values(moved, 0), (2 / 6) ** 0.5, atol=1e-5)
    with pytest.raises(ValueError, match=r"'lora_a' has shape \(6, 8, 2\); a single copy"):
        nnx_reader.lora_geometry(adapters(1))
    assert nnx_reader.geometry(adapters(1), Stiefel()) == {"lora_a": None, "lora_b": None}


def test_first_of_several_possible_stack_axes_is_taken_with_a_warning():
    model = equinox_stack(lambda key: eqx.nn.Linear(8, 8, use_bias=False, key=key), 0)
    with pytest.warns(UserWarning, match="'weight' has shape .* the first axis is taken"):
        geometry = equinox_reader.geometry(model, Stiefel())
    moved = optim.project_tree(geometry, eqx.filter(model, eqx.is_array))
    np.testing.assert_allclose(singular_values(moved.weight, 0), 1, atol=1e-5)


def test_ambiguous_stack_axis_is_refused():
    """Eight copies of a (3, 8) kernel: the last two axes are indistinguishable."""
    model = equinox_stack(lambda key: eqx.nn.Linear(8, 3, use_bias=False, key=key), 1)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 8, 8\); a single copy"):
        equinox_reader.geometry(model, Stiefel())


def test_embedding_stack_on_later_axis_is_refused():
    model = nnx_stack(lambda key: nnx.Embed(3, 5, rngs=nnx.Rngs(params=key)), 1)
    with pytest.raises(ValueError, match=r"'embedding' has shape \(3, 8, 5\)"):
        nnx_reader.geometry(model, Stiefel(), embedding=EmbeddingRows())
