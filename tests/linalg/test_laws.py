"""Every method of the table keeps every law of the interface."""

import jax
import pytest

from manifoldmuon.linalg import DEFAULT_MSIGN, SVD
from manifoldmuon.testing import check_msign
from tests.linalg.instances import METHODS, MethodCase


@pytest.mark.slow_except("default", "muon", "svd")
@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.name)
def test_a_stack_of_wide_matrices(case: MethodCase):
    check_msign(case.method, (2, 3, 5), jax.random.key(1), case.orthogonality)


@pytest.mark.parametrize("shape", [(6, 4), (1, 1)], ids=str)
def test_other_shapes(shape):
    check_msign(DEFAULT_MSIGN, shape, jax.random.key(2))


def test_a_broken_method_is_found(monkeypatch):
    """SVD that forgets sign(0) = 0, as the bare decomposition does."""
    monkeypatch.setattr(SVD, "polar", lambda self, x: _bare(x))
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"msign\(0\) == 0"):
        check_msign(SVD(cutoff=0.5), (4, 3), jax.random.key(3))


def _bare(x):
    left, _, right = jax.numpy.linalg.svd(x, full_matrices=False)
    return left @ right
