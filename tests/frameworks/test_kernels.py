"""Kernels of convolutions in every framework: dimensions, groups, stacks and gates."""

import itertools
import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon.frameworks import equinox, linen
from manifoldmuon.frameworks import nnx as nnx_reader
from manifoldmuon.manifolds import Euclidean, Hypersphere, Stiefel
from manifoldmuon.norms import ConvRMSToRMS
from tests.frameworks import test_lipschitz as convolutions

KERNELS = Euclidean(ConvRMSToRMS())
KEY, SIZES, CHANNELS = jax.random.key(0), (2, 3, 5), 4


class Layer(nn.Module):
    kernel: tuple[int, ...]
    groups: int

    @nn.compact
    def __call__(self, x, _):
        options: Any = {"feature_group_count": self.groups, "use_bias": False}
        return nn.Conv(CHANNELS, self.kernel, name="conv", **options)(x), None


def read_linen(kernel, groups, copies, convolutions):
    axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    layer = Layer if copies == 1 else nn.scan(Layer, length=copies, **axes)
    model, x = layer(kernel, groups), jnp.ones((1, *kernel, CHANNELS))
    params = jax.eval_shape(model.init, KEY, x, None)["params"]
    return linen.geometry(model, (x, None), Stiefel(), convolutions=convolutions), params


def read_nnx(kernel, groups, copies, convolutions):
    def make(key):
        options: Any = {"feature_group_count": groups, "use_bias": False}
        return nnx.Conv(CHANNELS, CHANNELS, kernel, **options, rngs=nnx.Rngs(params=key))

    keys = jax.random.split(KEY, copies)
    model = nnx.eval_shape(lambda: make(KEY) if copies == 1 else nnx.vmap(make)(keys))
    params = nnx.state(model, nnx.Param)
    return nnx_reader.geometry(model, Stiefel(), convolutions=convolutions), params


def read_equinox(kernel, groups, copies, convolutions):
    def make(key):
        conv: Any = (eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d)[len(kernel) - 1]
        return conv(CHANNELS, CHANNELS, kernel, groups=groups, use_bias=False, key=key)

    keys = jax.random.split(KEY, copies)
    model = eqx.filter_eval_shape(lambda: make(KEY) if copies == 1 else eqx.filter_vmap(make)(keys))
    params = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    where: Any = {"where": lambda x: isinstance(x, jax.ShapeDtypeStruct)}
    return equinox.geometry(model, Stiefel(), convolutions=convolutions, **where), params


READERS = [read_linen, read_nnx, read_equinox]
CASES = list(itertools.product(READERS, (1, 2, 3), (1, 2), (1, 7)))


def expected(array, reader, groups):
    """Return (copies, groups, *taps, fan_out, fan_in) by moving axes one by one."""
    if reader is not read_equinox:  # (copies, *taps, in, out)
        array = np.moveaxis(np.moveaxis(array, -1, 1), -1, 2)
    copies, out, *rest = array.shape  # (copies, out, in, *taps)
    cut = array.reshape(copies, groups, out // groups, *rest)
    return np.moveaxis(np.moveaxis(cut, 2, -1), 2, -1)


@pytest.mark.parametrize(("reader", "dims", "groups", "copies"), CASES)
def test_kernel_is_one_point_in_every_dimension(reader, dims, groups, copies):
    geometry, params = reader(SIZES[:dims], groups, copies, KERNELS)
    (entry,) = geometry.values()
    (shape,) = [x.shape for x in jax.tree.leaves(params)]
    assert math.prod(shape) == copies * math.prod(SIZES[:dims]) * CHANNELS**2 // groups
    assert entry.manifold == Euclidean(ConvRMSToRMS(tap_axes=dims))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = expected(numbers.reshape(copies, *shape[-dims - 2 :]), reader, groups)
    found = entry.layout.inward(numbers)
    assert found.shape[found.ndim - entry.manifold.ndim :] == wanted.shape[2:]
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    (row,) = optim.tabulate(geometry, params).rows  # would warn of undeclared copies
    assert row.copies == copies * groups


@pytest.mark.parametrize("make", [convolutions.linen, convolutions.equinox, convolutions.flax_nnx])
def test_transposed_convolution_is_one_point(make):
    _, params, geometry, _ = make(((2, 3), (1, 1), 1, "SAME", 1), True, convolutions=KERNELS)
    (entry,) = geometry.values()
    (kernel,) = params.values()
    found = entry.layout.inward(np.zeros(kernel.shape))
    assert found.shape == (2, 3, 1, 2)  # taps, then fan-out and fan-in
    (row,) = optim.tabulate(geometry, params).rows
    assert row.copies == 1


def test_depthwise_sequence_kernel_steps_in_its_own_norm():
    """Mamba's and Conformer's kernel: 24 channels, a group each, four taps."""
    model = nnx.Conv(24, 24, (4,), feature_group_count=24, use_bias=False, rngs=nnx.Rngs(0))
    geometry = nnx_reader.geometry(model, None, convolutions=KERNELS)
    tx, params = optim.scale_by_steepest(geometry), nnx.state(model, nnx.Param)
    updates: Any = tx.update(params, tx.init(params), params)[0]
    np.testing.assert_allclose(np.abs(updates["kernel"][...]), 1 / 4, rtol=1e-5)


def test_gates_of_linen_convolutional_lstm_are_matrices_of_their_own():
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.ConvLSTMCell(3, (2, 2), name="cell")
            return cell(cell.initialize_carry(KEY, x.shape), x)

    x = jnp.ones((1, 4, 4, 5))
    found = linen.geometry(Cell(), (x,), Stiefel())
    params = jax.eval_shape(Cell().init, KEY, x)["params"]
    rows = {row.path: row for row in optim.tabulate(found, params).rows}
    for path, channels in (("cell/ih/kernel", 5), ("cell/hh/kernel", 3)):
        assert (rows[path].copies, rows[path].fan_in, rows[path].fan_out) == (4, 4 * channels, 3)


def test_manifold_of_kernels_for_matrices_raises():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'kernel' is a matrix, but .* takes kernels: write"):
        nnx_reader.geometry(model, KERNELS)


@pytest.mark.parametrize("manifold", [KERNELS, Hypersphere(ndim=4)])
@pytest.mark.parametrize(("taps", "groups"), [((-3,), 1), ((-5, -4, -3), 1), ((), 2)])
def test_layout_with_other_taps_than_the_norm_raises(manifold, taps, groups):
    with pytest.raises(ValueError, match=rf"has 2 axes of taps, and Layout\(.* names {len(taps)}"):
        manifold.with_axes(-2, -1, taps, out_blocks=groups)
