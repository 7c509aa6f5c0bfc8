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


def test_ambiguous_stack_axis_is_refused():
    """Eight copies of a (3, 8) kernel: the last two axes are indistinguishable."""
    model = equinox_stack(lambda key: eqx.nn.Linear(8, 3, use_bias=False, key=key), 1)
    with pytest.raises(ValueError, match=r"'weight' has shape \(3, 8, 8\); a single copy"):
        equinox_reader.geometry(model, Stiefel())


def test_embedding_stack_on_later_axis_is_refused():
    model = nnx_stack(lambda key: nnx.Embed(3, 5, rngs=nnx.Rngs(params=key)), 1)
    with pytest.raises(ValueError, match=r"'embedding' has shape \(3, 8, 5\)"):
        nnx_reader.geometry(model, Stiefel(), embedding=EmbeddingRows())
