"""Baseline methods for msign: laws of the interface, and accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.linalg import msign
from studies.polar_methods import QDWH, GramEigh, InverseRoot
from tests.linalg.instances import conditioned, polar
from tests.linalg.msign_laws import check_msign

# Forward error in units of eps times the condition number.
METHODS = {QDWH(): 8, GramEigh(): 64, InverseRoot(): 8}
EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_methods_satisfy_msign_laws(method):
    check_msign(method, (2, 3, 5), jax.random.key(1), 10.0)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_accuracy_up_to_condition_number_1e6(method):
    for condition in (1.0, 1e3, 1e6):
        x = conditioned((24, 96), condition).astype(np.float32)
        q = np.asarray(msign(jnp.asarray(x), method), np.float64)
        assert np.linalg.norm(q @ q.T - np.eye(24)) <= 10 * EPS * np.sqrt(24)
        if condition < 1e6:
            error = np.linalg.norm(q - polar(x)) / np.sqrt(24)
            assert error <= METHODS[method] * EPS * condition
