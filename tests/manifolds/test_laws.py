"""Every manifold of the table keeps every law of the interface."""

import jax
import pytest

from manifoldmuon.testing import check_manifold
from tests.instances import MANIFOLDS, ManifoldCase


@pytest.mark.parametrize("case", MANIFOLDS, ids=lambda case: case.name)
def test_manifold_laws(case: ManifoldCase):
    key = jax.random.key(0)
    check_manifold(case.manifold, case.shape, key, gap=case.gap, thorough=case.thorough)
