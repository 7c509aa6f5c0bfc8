"""Layers of 1-Lipschitz networks: forward maps by NumPy, Jacobians, and manifolds."""

import jax
import numpy as np
import pytest

from manifoldmuon import contrib
from manifoldmuon.manifolds import Orthogonal
from manifoldmuon.modules import Bias, GroupSort
from tests.compiled import ask
from tests.modules.measure import gaussian, random_like, steepest_step

IMAGE = gaussian(0, 2, 4, 6, 5)


def test_group_sort_is_descending():
    x = gaussian(1, 3, 12)
    for size in (1, 2, 3, 12):
        found = ask(GroupSort(size).forward, x)
        groups = np.asarray(x).reshape(3, size, 12 // size)
        np.testing.assert_array_equal(found.reshape(groups.shape), -np.sort(-groups, axis=1))
    first, second = np.split(np.asarray(x), 2, axis=-1)
    pair = [np.maximum(first, second), np.minimum(first, second)]
    np.testing.assert_array_equal(ask(GroupSort(2).forward, x), np.concatenate(pair, axis=-1))


def test_pixel_rearrangements_match_loops():
    x = np.asarray(IMAGE)
    depth = ask(contrib.SpaceToDepth(2).forward, IMAGE)
    for row, column in np.ndindex(2, 3):
        block = x[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_array_equal(depth[:, row, column], block.reshape(2, -1))
    moved = ask(contrib.Shift(1).forward, IMAGE)
    for channel, way in enumerate([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]):
        np.testing.assert_array_equal(moved[..., channel], np.roll(x[..., channel], way, (1, 2)))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (contrib.orthogonal_conv2d(4, 3), (5, 6, 4)),
        (contrib.orthogonal_conv2d(4, 2), (3, 5, 4)),
        (contrib.orthogonal_conv2d(3, 1), (2, 2, 3)),
        (contrib.LocallyConnected((2, 3), 4, 4, Orthogonal()), (2, 3, 4)),
        (contrib.TwoTap(5, 2, axis=-2, offset=2), (7, 5)),
        (contrib.TwoTap(5, 3, axis=-3, offset=-1), (4, 2, 5)),
        (contrib.SpaceToDepth(2), (4, 6, 3)),
        (contrib.Shift(2), (5, 4, 7)),
        (GroupSort(2), (3, 6)),
        (GroupSort(3), (9,)),
    ],
    ids=repr,
)
def test_jacobians_are_orthogonal(net, shape):
    """Inputs are random, and weights are random points of their manifolds."""
    params, x = net.init(jax.random.key(0)), gaussian(3, *shape)
    found = ask(jax.jacobian(lambda x: net.apply(params, x)), x)
    matrix = np.float64(found).reshape(-1, x.size)
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(len(matrix)), atol=2e-6)


def test_orthogonal_convolution_is_a_convolution():
    """It commutes with shifts, and a pixel depends on a square of `kernel` pixels around it."""
    net, x = contrib.orthogonal_conv2d(4, 3), gaussian(4, 7, 8, 4)
    params = net.init(jax.random.key(1))
    both = np.stack([x, np.roll(x, (2, -3), (0, 1))])
    y, moved = ask(jax.vmap(net.apply, (None, 0)), params, both)
    np.testing.assert_allclose(moved, np.roll(y, (2, -3), (0, 1)), atol=1e-6)
    seen = ask(jax.jacobian(lambda x: net.apply(params, x)[3, 4]), x)
    reach = np.abs(seen).max(axis=(0, -1)) > 1e-6
    expected = np.zeros((7, 8), bool)
    expected[2:5, 3:6] = True
    np.testing.assert_array_equal(reach, expected)
    # The kernel is not separable: its taps, as a matrix, have rank above 1.
    taps = seen[0, 2:5, 3:6, 0]
    assert np.linalg.svd(taps, compute_uv=False)[1] > 1e-3


WELL_NORMED = [Bias(6), contrib.TwoTap(6, 2), contrib.TwoTap(6, 2).unconstrained().constrained()]


@pytest.mark.slow
@pytest.mark.parametrize("atom", WELL_NORMED, ids=repr)
def test_atoms_are_well_normed(atom):
    """A unit step moves outputs by the input's length; a unit bias step by an RMS of 1."""
    params = atom.init(jax.random.key(0))
    worst = 0.0
    for seed in range(20):
        x, grads = gaussian(seed, 6, 6), random_like(params, seed)
        step = steepest_step(atom, grads, params)
        np.testing.assert_allclose(atom.norm(step), 1, rtol=1e-4)
        moved = jax.jvp(lambda w, x=x: atom.apply(w, x), (params,), (step,))[1]
        size = np.sqrt(6 * 6) if isinstance(atom, Bias) else np.linalg.norm(x)
        worst = max(worst, float(np.linalg.norm(moved) / size))
    assert 0.5 < worst <= 1 + 1e-5
