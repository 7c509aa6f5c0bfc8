"""Baseline methods for msign satisfy the laws of the interface."""

import jax
import pytest

from benchmarks._polar_methods import QDWH, GramEigh, InverseRoot
from tests.linalg.msign_laws import check_msign

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", [QDWH(), GramEigh(), InverseRoot()], ids=repr)
def test_methods_satisfy_msign_laws(method):
    check_msign(method, (2, 3, 5), jax.random.key(1), 10.0)
