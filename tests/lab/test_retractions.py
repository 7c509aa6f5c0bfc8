"""Retractions: error slopes, random walks of known length, and errors."""

import jax
import numpy as np
import pytest

from manifoldmuon.lab import random_walk, retraction_order
from manifoldmuon.manifolds import EmbeddingRows, Hypersphere, Stiefel
from manifoldmuon.manifolds.retractions import QR, Exponential, Geodesic, Normalize, Polar
from studies.retractions.spaces import NoRetraction

SHAPES = {Stiefel: (16, 4), EmbeddingRows: (8, 16)}
RATES = (0.02, 0.5)


@pytest.mark.slow_except("Stiefel-QR()-2")
@pytest.mark.parametrize(
    ("kind", "retraction", "slope"),
    [
        (Stiefel, Polar(), 3),
        (Stiefel, QR(), 2),
        (EmbeddingRows, Normalize(), 3),
        (EmbeddingRows, NoRetraction(), 2),
        (EmbeddingRows, Geodesic(), None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_error_slope_is_order_plus_one(kind, retraction, slope):
    exact = {Stiefel: Exponential(), EmbeddingRows: Geodesic()}[kind]
    manifold, geodesic = (kind(retraction=which) for which in (retraction, exact))
    found = retraction_order(manifold, geodesic, SHAPES[kind], jax.random.key(1))
    if slope is None:
        assert found.slope is None
        assert max(found.errors) < 1e-12
    else:
        assert slope - 0.05 < found.slope < slope + 0.05
        assert np.all(np.diff(found.errors) < 0)


def walk(retraction, dtype, rates, steps, seed):
    """Return a random walk of rows and, by rate and time, their largest deviation from length 1."""
    rows = EmbeddingRows(1.0, retraction=retraction)
    found = random_walk(rows, SHAPES[EmbeddingRows], rates, steps, jax.random.key(seed), dtype)
    lengths = np.linalg.norm(np.asarray(found.points, np.float64), axis=-1)
    return found, np.abs(lengths - 1).max(axis=-1).T


@pytest.mark.slow
def test_walk_without_retraction_grows_by_pythagoras():
    """Steps of length eta are orthogonal to their row: |w|^2 = 1 + k eta^2 after k steps."""
    found, distances = walk(NoRetraction(), "float32", RATES, 25, 3)
    assert found.at == [1, 10, 25]
    expected = np.sqrt(1 + np.outer(np.square(RATES), found.at)) - 1
    np.testing.assert_allclose(distances, expected, rtol=2e-3)
    np.testing.assert_allclose(found.effective, 1, rtol=1e-4)


@pytest.mark.slow
def test_retracted_walk_stays_and_steps_are_chords():
    found, distances = walk(Normalize(), "float32", RATES, 25, 3)
    assert np.max(distances) < 1e-6
    chord = np.sqrt(2 - 2 / np.sqrt(1 + np.square(RATES))) / RATES
    np.testing.assert_allclose(found.effective, chord, rtol=1e-4)


def test_bfloat16_rounds_small_steps_away():
    """Entries of size 1/4 have a spacing of 2^-10, so steps of 1e-4 round to 0 or to a spacing."""
    found, distances = walk(Normalize(), "bfloat16", (1e-4, 0.5), 1, 0)
    chord = np.sqrt(2 - 2 / np.sqrt(1 + 0.5**2)) / 0.5
    assert abs(found.effective[0] - 1) > 0.1
    assert abs(found.effective[1] - chord) < 0.02
    assert 1e-5 < np.max(distances) < 1e-2


@pytest.mark.slow
def test_walks_accept_vectors_and_row_matrices():
    key = jax.random.key(4)
    for shape in ((5,), (1, 5)):
        manifold = Hypersphere(ndim=len(shape))
        points = random_walk(manifold, shape, (0.1, 0.2), 10, key).points
        assert points.shape == (2, 2, *shape)
        lengths = np.linalg.norm(points.reshape(2, 2, 5), axis=-1)
        np.testing.assert_allclose(lengths, 1, rtol=1e-6)
        exact = Hypersphere(ndim=len(shape), retraction=Geodesic())
        assert retraction_order(manifold, exact, shape, key).slope
    with pytest.raises(ValueError, match="shape must have 2 axes, as a point has; got"):
        random_walk(EmbeddingRows(), (8,), (0.1,), 10, key)
    with pytest.raises(ValueError, match="shape must have 1 axes, as a point has; got"):
        retraction_order(Hypersphere(), Hypersphere(retraction=Geodesic()), (3, 3), key)


@pytest.mark.parametrize(("rates", "steps"), [((0.1,), 0), ((), 5), ((0.1, 0.0), 5)])
def test_walk_without_steps_or_rates_raises(rates, steps):
    with pytest.raises(ValueError, match="steps must be at least 1 and rates positive; got"):
        random_walk(EmbeddingRows(), (8, 16), rates, steps, jax.random.key(0))
