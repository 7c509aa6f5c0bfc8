"""All norms in `tests.instances` satisfy all laws of the interface."""

import jax
import pytest

from manifoldmuon.testing import check_norm
from tests.instances import NORMS, NormCase


@pytest.mark.slow_except("infinity")
@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_norm_laws(case: NormCase):
    key = jax.random.key(0)
    check_norm(case.norm, case.shape, key, loss=case.loss, thorough=case.thorough)
