"""The laws have teeth: norms with one thing wrong are found."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.norms import Frobenius, MaxAbs
from manifoldmuon.testing import check_norm


class NotNormalised(Frobenius):
    def dualize(self, grad):
        return grad


class WrongDual(MaxAbs):
    def dual_norm(self, grad):
        return jnp.max(jnp.abs(grad), axis=(-2, -1))


class Overflows(Frobenius):
    def norm(self, weight):
        return jnp.sqrt(jnp.sum(weight**2, axis=(-2, -1)))


class SignOfZero(MaxAbs):
    def dualize(self, grad):
        return jnp.where(grad >= 0, 1.0, -1.0).astype(grad.dtype)


class SwallowsNaN(Frobenius):
    def dualize(self, grad):
        return super().dualize(jnp.nan_to_num(grad))


class OverConfident(Frobenius):
    """Nine tenths of the best direction, certified as all of it."""

    def dualize(self, grad):
        return 0.9 * super().dualize(grad)

    def gap(self, grad, direction):
        return 0 * super().gap(grad, direction)


class BoundTooSmall(Frobenius):
    """Steps that it shortens are twice too long."""

    def bound(self, weight):
        return 0.5 * super().bound(weight)


BROKEN = [
    (NotNormalised, r"norm\(dualize\(g\)\) == 1"),
    (WrongDual, r"<g, dualize\(g\)> == dual_norm\(g\)"),
    (Overflows, r"norm\(dualize\(g\)\)|norm\(c w\) == c norm\(w\)|dual_norm"),
    (SignOfZero, "dualize of zero is zero"),
    (SwallowsNaN, r"a NaN stays visible \(dualize\)"),
    (BoundTooSmall, r"norm\(w\) <= bound\(w\)"),
    (OverConfident, r"norm\(dualize\(g\)\) == 1"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_norm_is_found(broken, law):
    with pytest.raises(AssertionError, match=f"law broken: ({law})"):
        check_norm(broken(), (4, 3), jax.random.key(0), thorough=False)


def test_a_gap_that_is_not_a_bound_is_found():
    """The looseness allowed to a method must be in its certificate."""
    with pytest.raises(AssertionError, match=r"law broken: gap bounds 1 - <g, dualize\(g\)>"):
        check_norm(OverConfident(), (4, 3), jax.random.key(0), loss=0.2, thorough=False)
