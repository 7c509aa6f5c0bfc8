"""`check_msign` detects methods with a single defect and names the broken law."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.linalg import SVD
from tests.broken import broken
from tests.linalg.msign_laws import check_msign


def is_zero(x):
    return jnp.all(x == 0, axis=(-2, -1), keepdims=True)


def damp(sound, x):
    """Shrink singular values below 1e-4 of the largest, like an epsilon in a denominator."""
    left, values, right = jnp.linalg.svd(x, full_matrices=False)
    share = values / jnp.where(values[..., :1] == 0, 1, values[..., :1])
    return left * (share / jnp.sqrt(share**2 + 1e-9) * (share > 1e-7))[..., None, :] @ right


def flip_small(sound, x):
    """Negate singular vectors of values below 1e-2 of the largest."""
    left, values, right = jnp.linalg.svd(x, full_matrices=False)
    sign = jnp.sign(values) * jnp.where(values > 1e-2 * values[..., :1], 1, -1)
    return left * sign[..., None, :] @ right


def unguarded(sound, x):
    """Compute `X (X^T X)^(-1/2)`, except for zero."""
    values, basis = jnp.linalg.eigh(jnp.swapaxes(x, -1, -2) @ x)
    root = basis / jnp.sqrt(values)[..., None, :] @ jnp.swapaxes(basis, -1, -2)
    return sound.polar(jnp.where(is_zero(x), 0, x @ root))


def fill_zero(sound, x):
    """Do not map zero to zero, like the bare decomposition."""
    left, _, right = jnp.linalg.svd(x, full_matrices=False)
    return left @ right


def fill_rank(sound, x):
    """Set singular values of zero to 1, except for a matrix of zeros."""
    return jnp.where(is_zero(x), 0, fill_zero(sound, x))


BROKEN = [
    (damp, r"2\. law broken: .*Q\^T Q - I.* at condition 1000"),
    (flip_small, r"2\. law broken: Q\^T X is positive semi-definite at condition 1000"),
    (unguarded, r"3\. law broken: .*without full rank"),
    (fill_rank, r"3\. law broken: rows and columns of zeros stay zero"),
    (fill_zero, r"4\. law broken: msign\(0\) == 0"),
]


@pytest.mark.parametrize(("polar", "law"), BROKEN, ids=[polar.__name__ for polar, _ in BROKEN])
def test_broken_method_is_found(polar, law):
    with pytest.raises(AssertionError, match=law):
        check_msign(broken(SVD(), polar=polar), (4, 3), jax.random.key(3))
