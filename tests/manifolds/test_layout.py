"""Layouts and their application to trees, against rearrangements by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from manifoldmuon import optim
from manifoldmuon.manifolds import LaidOut, Layout, Manifold, Stiefel
from manifoldmuon.manifolds.solvers import Steepest
from manifoldmuon.norms import FanRatio, Frobenius
from tests.compiled import ask


@dataclasses.dataclass(frozen=True)
class Probe(Manifold):
    """A fake manifold with methods that weight entries by index, so misplaced entries show."""

    ndim: int = 2

    @property
    def norm(self):
        return Frobenius(self.ndim)

    def check_shape(self, shape):
        if len(shape) < self.ndim:
            raise ValueError("too few axes")

    def project(self, point):
        return point * self._weights(point)

    def project_tangent(self, point, vector):
        return point - 2 * self.project(vector)

    def init_dual(self, shape):
        return jnp.zeros(shape[:-1])

    def steepest(self, point, grad, dual):
        # The cold start has the rearranged shape, not the array's shape.
        assert jax.tree.leaves(dual)[0].shape == point.shape[:-1]
        direction = 3 * point - self.project(grad)
        return Steepest(direction, dual + 1, self._sum(grad), self._sum(point))

    def retract(self, point, vector):
        return point + 5 * self.project(vector)

    def random_point(self, key, shape, dtype):
        return jax.random.normal(key, shape, dtype)

    def distance(self, point):
        return -self._sum(point)

    def _sum(self, array):
        return jnp.sum(self.project(array), axis=tuple(range(-self.ndim, 0)))

    def _weights(self, point):
        shape = point.shape[-self.ndim :]
        return jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)


INNER, KERNEL = Probe(), Probe(ndim=4)

# The geometry entry, the array's shape, the einsum to the inner manifold, and the inner shape if
# axes are merged.
LAYOUTS = {
    "flax kernel": (INNER.with_axes(0, 1), (3, 5), "io->oi", None),
    "stack of flax kernels": (INNER.transposed().stacked(), (2, 3, 5), "lio->loi", None),
    "fused heads": (INNER.with_axes(0, (1, 2)), (3, 2, 4), "ihd->hdi", (8, 3)),
    "order of the axes named": (INNER.with_axes((1, 0), 2), (2, 4, 3), "hdo->odh", (3, 8)),
    "hwio flattened": (INNER.with_axes((0, 1, 2), 3), (3, 2, 2, 5), "hwio->ohwi", (5, 12)),
    "hwio, taps named": (INNER.with_axes(-2, -1, taps=(-4, -3)), (3, 2, 2, 5), "hwio->hwoi", None),
    "oihw by taps, ndim said": (INNER.with_axes(1, 0, ndim=4), (5, 2, 3, 2), "oihw->hwoi", None),
    "conv norm, a stack": (KERNEL.transposed().stacked(), (4, 3, 2, 2, 5), "lhwio->lhwoi", None),
    "conv norm, oihw": (KERNEL.with_axes(1, 0, taps=(2, 3)), (5, 2, 3, 2), "oihw->hwoi", None),
    "the middle apart": (INNER.with_axes(-1, -3), (5, 2, 3), "ohi->hoi", None),
}
TAPS = KERNEL.with_axes(-2, -1, taps=(-5, -3))
LAYOUTS["conv norm, taps behind a stack"] = TAPS, (3, 4, 2, 2, 5), "hlwio->lhwoi", None


@pytest.mark.parametrize(("entry", "shape", "moves", "flat"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_match_rearrangements(entry, shape, moves, flat):
    entry.check_shape(shape)
    inner = entry.manifold

    def inward(x):
        moved = jnp.einsum(moves, x)
        return moved if flat is None else moved.reshape(flat)

    inner_shape = jax.eval_shape(inward, jax.ShapeDtypeStruct(shape, "float32")).shape
    assert entry.layout.inner_shape(shape) == inner_shape
    vector = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    geometry: Any = {"w": entry}
    steepest = optim.scale_by_steepest(geometry)
    retract = optim.start_anywhere(optim.retract(geometry))  # the distance of a `Probe` is none

    @jax.jit
    def compare(vector):
        example = {"w": vector}
        params = optim.init_tree(geometry, jax.random.key(0), example)
        found: Any = steepest.update(example, steepest.init(params), params)
        moved: Any = retract.update(example, retract.init(params), params)[0]
        p, v = inward(params["w"]), inward(vector)
        measure = lambda manifold, point, _: (None, manifold.distance(point))  # noqa: E731
        _, distances = optim.map_leaves(measure, geometry, params, params)
        expected = inner.steepest(p, v, inner.init_dual(inner_shape))
        return [
            (entry.layout.outward(p, shape), params["w"]),
            (inward(found[0]["w"]), expected.direction),
            (found[1].dual["w"], expected.dual),
            (found[1].gap["w"], expected.gap),
            (found[1].residual["w"], expected.residual),
            (inward(optim.project_tree(geometry, example)["w"]), inner.project(v)),
            (inward(moved["w"]), inner.retract(p, v) - p),
            (distances["w"], inner.distance(p)),
        ]

    for actual, expected in compare(vector):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


def pieces(x, count, axis):
    """Stack consecutive equal parts along an axis, on a new axis before the last two."""
    return np.stack(np.split(x, count, axis), -3)


# Blocks of one array, cut by hand.
# fmt: off
BLOCKS = {
    "fused q, k, v": (Layout(out_blocks=6), (12, 5), lambda x: pieces(x, 6, -2)),
    "a stack of them, as Flax has it":
        (Layout(-2, -1, out_blocks=3), (2, 5, 12), lambda x: pieces(x.swapaxes(-1, -2), 3, -2)),
    "a grid": (Layout(in_blocks=2, out_blocks=3), (6, 8),
               lambda x: np.stack([pieces(rows, 2, -1) for rows in np.split(x, 3, 0)])),
    "heads on an axis, in pairs":
        (Layout(0, (1, 2), out_blocks=2), (5, 4, 3), lambda x: pieces(x.reshape(5, 12).T, 2, -2)),
    "tap by tap": (Layout(-2, -1, taps=(-4, -3), out_blocks=2), (3, 3, 4, 6),
                   lambda x: np.stack(np.split(x.swapaxes(-1, -2), 2, -2))),
}
# fmt: on


@pytest.mark.parametrize(("layout", "shape", "by_hand"), BLOCKS.values(), ids=BLOCKS.keys())
def test_blocks_match_manual_split(layout, shape, by_hand):
    array = np.random.default_rng(0).normal(size=shape)
    layout.check_shape(shape)
    cut = layout.inward(array)
    assert cut.shape == layout.inner_shape(shape)
    np.testing.assert_array_equal(cut, by_hand(array))
    np.testing.assert_array_equal(layout.outward(cut, shape), array)


def test_convolution_fan_in_and_fan_out():
    """The fan-in counts the taps only if they are flattened into it."""
    shape = (3, 3, 4, 16)

    def draw(*axes):
        entry, example = Stiefel(FanRatio()).with_axes(*axes), jax.ShapeDtypeStruct(shape, "f4")
        return ask(lambda key: optim.init_tree(entry, key, example), jax.random.key(0))

    whole = draw((0, 1, 2), 3).reshape(36, 16)
    np.testing.assert_allclose(np.linalg.norm(whole, 2), np.sqrt(16 / 36), rtol=1e-5)
    taps = draw(2, 3)
    np.testing.assert_allclose(np.linalg.norm(taps, 2, axis=(2, 3)), np.sqrt(16 / 4), rtol=1e-5)


def test_equivalent_layouts_are_equal():
    """Equivalent spellings must be equal, so that equal leaves are solved together."""
    layouts = [Layout(0, 1), Layout((0,), (1,)), Layout(-2, -1), INNER.transposed().layout]
    layouts += [INNER.with_axes(0, 1).layout, Layout.from_muon(MuonDimensionNumbers())]
    assert len(set(layouts)) == 1
    assert Layout(1, 0) != Layout(0, 1)
    assert Layout() == Layout(-1, -2) == Layout(1, 0)
    assert Layout(0, -1, ndim=3) == Layout(-3, -1)


@pytest.mark.parametrize(
    ("dims", "ndim", "expected"),
    [
        (MuonDimensionNumbers(), 0, Layout(0, 1)),
        (MuonDimensionNumbers(1, 0), 0, Layout(1, 0)),
        (MuonDimensionNumbers((0, 1, 2), 3), 0, Layout((0, 1, 2), 3)),
        (MuonDimensionNumbers([0], [1, 2]), 0, Layout(0, (1, 2))),
        (MuonDimensionNumbers(1, 0), 4, Layout(-3, -4, ndim=4)),
    ],
)
def test_layout_from_optax_dimension_numbers(dims, ndim, expected):
    assert Layout.from_muon(dims, ndim) == expected


def test_entry_ndim_counts_weight_axes():
    assert INNER.with_axes(0, (1, 2)).ndim == 3
    assert LaidOut(KERNEL, Layout(-2, -1)).ndim == 4
