"""Bounds for weights near their manifolds, against a search at exactly that distance."""

import pytest

from manifoldmuon import manifolds
from manifoldmuon.bounds import MatrixBounds, NormBound, bound, matrix_bounds
from manifoldmuon.modules import Linear
from manifoldmuon.norms import Spectral
from tests.oracles.bounds import drifted

DRIFT = 0.1
SETS = [
    (manifolds.Stiefel(2.0), (3, 5)),
    (manifolds.Orthogonal(3.0), (3, 3)),
    (manifolds.Grassmann(), (5, 3)),
    (manifolds.SpectralBand(0.3, 0.8), (6, 4)),
    (manifolds.SpectralBall(0.5), (4, 4)),
    (manifolds.SpectralSphere(2.0), (4, 3)),
    (manifolds.Hypersphere(2.0), (4, 3)),
    (manifolds.Hypersphere(2.0, ndim=2), (4, 3)),
    (manifolds.EmbeddingRows(), (4, 3)),
]


@pytest.mark.slow_except("Stiefel-tuple", "EmbeddingRows-tuple")
@pytest.mark.parametrize(("manifold", "shape"), SETS, ids=lambda x: type(x).__name__)
def test_drifted_matrices_stay_within_bounds(manifold, shape):
    """The search attains the largest and (positive) smallest singular values within 6 %."""
    known, found = matrix_bounds(manifold, shape, DRIFT), drifted(manifold, shape, DRIFT)
    near = 1e-6 * known.spectral
    assert found["spectral"] <= known.spectral + near
    assert found["row"] <= known.row + near
    assert found["least_singular"] >= known.least_singular - near
    assert found["least_row"] >= known.least_row - near
    assert found["spectral"] >= 0.94 * known.spectral
    assert found["least_singular"] <= 1.06 * known.least_singular + 0.02 * known.spectral


def test_drift_to_singular_matrix_has_no_lower_bound():
    net = Linear(5, 3, manifolds.SpectralBand(0.05, 1.0))
    one = NormBound(1.0, 1.0)
    assert bound(net, drift=0.04, input_norm=one).outputs.lower > 0
    assert bound(net, drift=0.06, input_norm=one).outputs.lower == 0


def test_drift_ignores_flat_space():
    assert bound(Linear(3, 3), drift=0.5).lipschitz_inputs == 1


def test_rule_without_drift_raises_on_drift():
    class Mine(manifolds.Stiefel):
        pass

    @matrix_bounds.register
    def bound_mine(space: Mine, shape: tuple[int, ...]):
        return MatrixBounds(2.0, 2.0)

    net = Linear(3, 3, Mine(step_norm=Spectral()))
    assert bound(net).lipschitz_inputs == 2
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        bound(net, drift=0.1)
    assert bound(Linear(3, 3, manifolds.Euclidean(Spectral())), drift=0.1).lipschitz_inputs == 1
