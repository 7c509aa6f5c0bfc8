"""`check_msign` detects methods with a single defect and names the broken law."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.linalg import SVD
from manifoldmuon.testing import check_msign


class Damped(SVD):
    """Shrinks singular values below 1e-4 of the largest, like an epsilon in a denominator."""

    def polar(self, x):
        left, values, right = jnp.linalg.svd(x, full_matrices=False)
        share = values / jnp.where(values[..., :1] == 0, 1, values[..., :1])
        return left * (share / jnp.sqrt(share**2 + 1e-9) * (share > 1e-7))[..., None, :] @ right


class FlipsSmall(SVD):
    """Negates singular vectors of values below 1e-2 of the largest."""

    def polar(self, x):
        left, values, right = jnp.linalg.svd(x, full_matrices=False)
        sign = jnp.sign(values) * jnp.where(values > 1e-2 * values[..., :1], 1, -1)
        return left * sign[..., None, :] @ right


class Unguarded(SVD):
    """`X (X^T X)^(-1/2)`, except for zero."""

    def polar(self, x):
        values, basis = jnp.linalg.eigh(jnp.swapaxes(x, -1, -2) @ x)
        root = basis / jnp.sqrt(values)[..., None, :] @ jnp.swapaxes(basis, -1, -2)
        zero = jnp.all(x == 0, axis=(-2, -1), keepdims=True)
        return super().polar(jnp.where(zero, 0, x @ root))


class FillsRank(SVD):
    """Sets singular values of zero to 1, except for a matrix of zeros."""

    def polar(self, x):
        left, _, right = jnp.linalg.svd(x, full_matrices=False)
        return jnp.where(jnp.all(x == 0, axis=(-2, -1), keepdims=True), 0, left @ right)


class FillsZero(SVD):
    """Does not map zero to zero, like the bare decomposition."""

    def polar(self, x):
        left, _, right = jnp.linalg.svd(x, full_matrices=False)
        return left @ right


BROKEN = [
    (Damped, r"2\. law broken: .*Q\^T Q - I.* at condition 1000"),
    (FlipsSmall, r"2\. law broken: Q\^T X is positive semi-definite at condition 1000"),
    (Unguarded, r"3\. law broken: .*without full rank"),
    (FillsRank, r"3\. law broken: rows and columns of zeros stay zero"),
    (FillsZero, r"4\. law broken: msign\(0\) == 0"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_broken_method_is_found(broken, law):
    with pytest.raises(AssertionError, match=law):
        check_msign(broken(), (4, 3), jax.random.key(3))
