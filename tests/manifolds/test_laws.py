"""All manifolds in `tests.instances` satisfy all laws of the interface."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.retractions import QR, Cayley, Exponential
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar, Resolvents, SkewPolar
from manifoldmuon.testing import check_manifold, check_slopes
from tests.instances import MANIFOLDS, ManifoldCase

SOLVERS = [
    ManifoldCase("stiefel by skew lift", Stiefel(solver=SkewPolar()), (8, 3)),
    ManifoldCase("stiefel by resolvents", Stiefel(solver=Resolvents()), (8, 3), gap=5e-3),
    ManifoldCase("stiefel by one step", Stiefel(solver=ProjectedPolar()), (8, 3), gap=0.3),
    ManifoldCase("stiefel by dual ascent", Stiefel(solver=DualAscent(steps=40)), (8, 3), gap=0.3),
]


@pytest.mark.slow_except("stiefel tall")
@pytest.mark.parametrize("case", [*MANIFOLDS, *SOLVERS], ids=lambda case: case.name)
def test_manifold_laws(case: ManifoldCase):
    key = jax.random.key(0)
    check_manifold(
        case.manifold, case.shape, key, gap=case.gap, thorough=case.thorough, convex=case.convex
    )


RETRACTIONS = [
    ManifoldCase(f"by {type(retraction).__name__}", Stiefel(retraction=retraction), (7, 3))
    for retraction in (QR(), Cayley(), Exponential())
]


@pytest.mark.slow_except("stiefel wide, scaled", "by QR")
@pytest.mark.parametrize("case", [*MANIFOLDS, *RETRACTIONS], ids=lambda case: case.name)
def test_retraction_and_gradient_slopes(case: ManifoldCase):
    retraction = getattr(case.manifold, "retraction", None)
    check_slopes(case.manifold, case.shape, jax.random.key(0), getattr(retraction, "order", 1))


DOUBLE = ("spheres of radius 3", "embedding rows", "orthogonal odd stack", "stiefel wide, scaled",
          "grassmann wide stack, by svd", "fixed Frobenius norm by spectral steps",
          "rows by spectral steps", "spectral sphere, wide stack, by svd", "spectral ball",
          "spectral band, wide stack")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in MANIFOLDS if c.name in DOUBLE], ids=lambda c: c.name)
def test_manifold_laws_in_float64(case: ManifoldCase):
    """Check one manifold of each kind, within 1e-13 of the set."""
    limits = {"tolerance": 1e-11, "gap": case.gap, "on_set": 1e-13, "overshoot": 1e-13}
    options = {"thorough": False, "dtype": jnp.float64, "convex": case.convex}
    with jax.enable_x64(True):
        check_manifold(case.manifold, case.shape, jax.random.key(0), **limits, **options)
