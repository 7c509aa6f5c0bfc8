"""The layout wrapper against rearrangements written out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from manifoldmuon.manifolds import (
    Axes,
    FanRatio,
    Hypersphere,
    Manifold,
    Orthogonal,
    Steepest,
    Stiefel,
)
from manifoldmuon.manifolds._points import require_axes


@dataclasses.dataclass(frozen=True)
class Probe(Manifold):
    """No geometry, but every method weighs each entry by its place: a wrong one shows."""

    ndim: int = 2

    def check_shape(self, shape):
        require_axes(self, shape)

    def project(self, point):
        return point * self._weights(point)

    def tangent(self, point, vector):
        return point - 2 * self.project(vector)

    def norm(self, vector):
        return jnp.sum(self.project(vector), axis=tuple(range(-self.ndim, 0)))

    def init_dual(self, shape):
        return jnp.zeros(shape[:-1])

    def steepest(self, point, grad, dual):
        # The cold start of the rearranged shape, not of the array's own.
        assert jax.tree.leaves(dual)[0].shape == point.shape[:-1]
        direction = 3 * point - self.project(grad)
        return Steepest(direction, dual, self.norm(grad), self.norm(point))

    def retract(self, point, vector):
        return point + 5 * self.project(vector)

    def random_point(self, key, shape, dtype):
        return jax.random.normal(key, shape, dtype)

    def distance(self, point):
        return -self.norm(point)

    def _weights(self, point):
        shape = point.shape[-self.ndim :]
        return jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)


INNER, KERNEL = Probe(), Probe(ndim=4)

# The wrapper, the shape of the array, how its entries reach the inner manifold, and the shape
# that they take there.
LAYOUTS = {
    "flax kernel": (Axes(INNER, 0, 1), (3, 5), "io->oi", None),
    "stack of flax kernels": (Axes(INNER, -2, -1), (2, 3, 5), "lio->loi", None),
    "torch matrix": (Axes(INNER, 1, 0), (5, 3), "oi->oi", None),
    "fused heads": (Axes(INNER, 0, (1, 2)), (3, 2, 4), "ihd->hdi", (8, 3)),
    "heads apart": (Axes(INNER, 0, 2), (3, 2, 4), "ihd->hdi", None),
    "output projection": (Axes(INNER, (0, 1), 2), (2, 4, 3), "hdo->ohd", (3, 8)),
    "order of the axes named": (Axes(INNER, (1, 0), 2), (2, 4, 3), "hdo->odh", (3, 8)),
    "hwio flattened": (Axes(INNER, (0, 1, 2), 3), (3, 2, 2, 5), "hwio->ohwi", (5, 12)),
    "hwio by taps": (Axes(INNER, 2, 3), (3, 2, 2, 5), "hwio->hwoi", None),
    "oihw flattened": (Axes(INNER, (1, 2, 3), 0), (5, 2, 3, 2), "oihw->oihw", (5, 12)),
    "oihw by taps": (Axes(INNER, -3, -4), (5, 2, 3, 2), "oihw->hwoi", None),
    "oihw by taps, ndim said": (Axes(INNER, 1, 0, ndim=4), (5, 2, 3, 2), "oihw->hwoi", None),
    "conv norm": (Axes(KERNEL, 2, 3), (3, 2, 2, 5), "hwio->hwoi", None),
    "conv norm, a stack": (Axes(KERNEL, -2, -1), (4, 3, 2, 2, 5), "lhwio->lhwoi", None),
    "the middle apart": (Axes(INNER, -1, -3), (5, 2, 3), "ohi->hoi", None),
    "transposed": (Axes.transposed(INNER), (4, 7), "dv->vd", None),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(layout):
    axes, shape, moves, flat = layout
    axes.check_shape(shape)
    inner = axes.manifold

    def inward(x):
        moved = jnp.einsum(moves, x)
        return moved if flat is None else moved.reshape(flat)

    inner_shape = jax.eval_shape(inward, jax.ShapeDtypeStruct(shape, "float32")).shape
    vector = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    @jax.jit
    def compare(vector):
        key = jax.random.key(0)
        point = axes.random_point(key, shape, jnp.float32)
        answer = axes.steepest(point, vector, axes.init_dual(shape))
        p, v = inward(point), inward(vector)
        expected = inner.steepest(p, v, inner.init_dual(inner_shape))
        return [
            (p, inner.random_point(key, inner_shape, jnp.float32)),
            (inward(answer.direction), expected.direction),
            (answer.gap, expected.gap),
            (answer.residual, expected.residual),
            (inward(axes.tangent(point, vector)), inner.tangent(p, v)),
            (inward(axes.project(vector)), inner.project(v)),
            (inward(axes.retract(point, vector)), inner.retract(p, v)),
            (axes.distance(point), inner.distance(p)),
            (axes.norm(vector), inner.norm(v)),
        ]

    for actual, expected in compare(vector):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_fan_in_and_fan_out_of_a_convolution():
    """Flattened, the fan-in counts the taps; tap by tap it does not."""
    shape = (3, 3, 4, 16)

    def draw(manifold):
        random_point = jax.jit(lambda key: manifold.random_point(key, shape, jnp.float32))
        return np.asarray(random_point(jax.random.key(0)))

    whole = draw(Axes(Stiefel(FanRatio()), (0, 1, 2), 3)).reshape(36, 16)
    np.testing.assert_allclose(np.linalg.norm(whole, 2), np.sqrt(16 / 36), rtol=1e-5)
    taps = draw(Axes(Stiefel(FanRatio()), 2, 3))
    np.testing.assert_allclose(np.linalg.norm(taps, 2, axis=(2, 3)), np.sqrt(16 / 4), rtol=1e-5)


def test_equal_layouts_are_equal():
    """However they are written: leaves with equal manifolds and shapes are solved together."""
    layouts = [Axes(INNER, 0, 1), Axes(INNER, (0,), (1,)), Axes(INNER, -2, -1)]
    layouts += [Axes.transposed(INNER), Axes.from_muon(INNER, MuonDimensionNumbers())]
    assert len(set(layouts)) == 1
    assert Axes(INNER, 1, 0) != Axes(INNER, 0, 1)


@pytest.mark.parametrize(
    ("dims", "ndim", "expected"),
    [
        (MuonDimensionNumbers(), 0, Axes(INNER, 0, 1)),
        (MuonDimensionNumbers(1, 0), 0, Axes(INNER, 1, 0)),
        (MuonDimensionNumbers((0, 1, 2), 3), 0, Axes(INNER, (0, 1, 2), 3)),
        (MuonDimensionNumbers([0], [1, 2]), 0, Axes(INNER, 0, (1, 2))),
        (MuonDimensionNumbers(1, 0), 4, Axes(INNER, -3, -4)),
    ],
)
def test_dimension_numbers_of_optax(dims, ndim, expected):
    assert Axes.from_muon(INNER, dims, ndim) == expected


def test_a_parameter_that_muon_leaves_to_adam():
    with pytest.raises(TypeError, match=r"None.* Adam.* Euclidean\(\)"):
        Axes.from_muon(INNER, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axes(INNER, 0, 0), "in_axes=0 and out_axes=0 name the same axis twice"),
        (lambda: Axes(INNER, (0, 1), 1), "name the same axis twice in an array of 3 axes"),
        (lambda: Axes(INNER, 0, -1), "count from both ends; use one sign, or say ndim"),
        (lambda: Axes(INNER, 0, 3, ndim=3), "ndim=3 is too small: .* need 4"),
        (lambda: Axes(INNER, (), 1), r"in_axes must be an axis number or several; got \(\)"),
        (lambda: Axes(Hypersphere(), 0, 1), "a point of Hypersphere has 1 axes; use that"),
    ],
)
def test_wrong_axes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (Axes(INNER, 0, (1, 2)), (4, 5), r"at least 3 axes; got the shape \(4, 5\)"),
        # OIHW: are the first axes a stack of layers, or the last ones taps?
        (Axes(INNER, 1, 0), (8, 4, 3, 3), r"reach 2 axes from the front.* has 4: .* or say ndim"),
        (Axes(Orthogonal(), 0, (1, 2)), (4, 2, 3), r"square .* \(6, 4\).*Axes made that"),
    ],
)
def test_wrong_shapes(axes, shape, message):
    with pytest.raises(ValueError, match=message):
        axes.check_shape(shape)


def test_both_signs_where_ndim_is_said():
    assert Axes(INNER, 0, -1, ndim=3) == Axes(INNER, -3, -1)
