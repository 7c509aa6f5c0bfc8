"""The repr of manifolds, norms and strategies shows non-default fields and evaluates back."""

import pytest
from jax.lax import Precision

from manifoldmuon import contrib, linalg, manifolds, norms
from manifoldmuon.manifolds import Euclidean, Layout, Stiefel, retractions, solvers
from tests.instances import MANIFOLDS, NORMS

NAMES = {"Precision": Precision} | {
    name: getattr(package, name)
    for package in (linalg, norms, manifolds, retractions, solvers, contrib)
    for name in package.__all__
}
VALUES = {
    **{case.name: case.manifold for case in MANIFOLDS},
    **{case.name: case.norm for case in NORMS},
    "presets": Stiefel(2.0, solvers.ProjectedPolar()),
    "training": norms.Spectral(linalg.TRAINING_MSIGN),
    "layout": Layout(0, (1, 2), out_blocks=2),
    "layout of a batch": Layout(ndim=3),
    "kernel": Layout(-2, -1, taps=(-4, -3)),
    "laid out": Euclidean(norms.RMSToRMS()).transposed(),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_repr_evaluates_to_equal_value(value):
    assert eval(repr(value), NAMES) == value


def test_repr_omits_defaults():
    assert repr(Stiefel()) == "Stiefel()"
    assert repr(Stiefel(2.0)) == "Stiefel(scale=2.0)"
    assert repr(Layout()) == "Layout()"
    assert repr(Euclidean(norms.RMSToRMS())) == "Euclidean(step_norm=RMSToRMS())"
    assert repr(Euclidean(norms.Frobenius(0))) == "Euclidean(step_norm=Frobenius(ndim=0))"
