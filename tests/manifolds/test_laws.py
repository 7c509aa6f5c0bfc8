"""Every manifold of the table keeps every law of the interface."""

import jax
import pytest

from manifoldmuon.testing import check_manifold
from tests.instances import MANIFOLDS, ManifoldCase


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_manifold_laws(case: ManifoldCase):
    check_manifold(case.manifold, case.shape, jax.random.key(0), gap=case.gap, on_set=case.on_set)
