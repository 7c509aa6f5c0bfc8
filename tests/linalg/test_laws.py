"""All methods in the table satisfy all laws of the interface."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.linalg import DEFAULT_MSIGN, msign
from tests.linalg.instances import METHODS, MethodCase
from tests.linalg.msign_laws import check_msign


@pytest.mark.slow_except("default", "muon", "svd")
@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.name)
def test_msign_laws_on_wide_stack(case: MethodCase):
    key, condition = jax.random.key(1), case.condition
    check_msign(case.method, (2, 3, 5), key, case.orthogonality, condition=condition)


@pytest.mark.parametrize("shape", [(6, 4), (1, 1)], ids=str)
def test_msign_laws_on_other_shapes(shape):
    check_msign(DEFAULT_MSIGN, shape, jax.random.key(2))


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 4)], ids=str)
def test_empty_matrices_keep_shape_and_dtype(shape):
    found = msign(jnp.zeros(shape, jnp.bfloat16))
    assert found.shape == shape
    assert found.dtype == jnp.bfloat16
