"""`check_norm` detects norms with a single defect and names the broken law."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.norms import Frobenius, MaxAbs, Spectral
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
    """Returns nine tenths of the best direction with a gap of zero."""

    def dualize(self, grad):
        return 0.9 * super().dualize(grad)

    def gap(self, grad, direction):
        return 0 * super().gap(grad, direction)


class BoundTooSmall(Frobenius):
    """Shortened steps stay twice too long."""

    def bound(self, weight):
        return 0.5 * super().bound(weight)


class BoundTooLarge(Frobenius):
    """Shortened steps vanish."""

    def bound(self, weight):
        return 100 * super().bound(weight)


class GapOfZero(Frobenius):
    """Correct only for `dualize`, which is exact."""

    def gap(self, grad, direction):
        return 0 * super().gap(grad, direction)


class GapByLength(Spectral):
    """Gives every direction of norm 1 a gap of zero."""

    def gap(self, grad, direction):
        missed = 1 - jnp.linalg.norm(direction.astype(jnp.float32), 2, axis=(-2, -1))
        return jnp.where(jnp.any(grad != 0, axis=(-2, -1)), jnp.maximum(missed, 0), 0)


class FillsRank(Spectral):
    """Also sets zero singular values to 1, as the bare decomposition does."""

    def dualize(self, grad):
        left, _, right = jnp.linalg.svd(grad, full_matrices=False)
        return jnp.where(jnp.any(grad != 0, axis=(-2, -1), keepdims=True), left @ right, 0)


class FillsZeros(MaxAbs):
    """Gives zero entries the sign 1, unless all entries are zero."""

    def dualize(self, grad):
        sign = jnp.where(grad >= 0, 1.0, jnp.sign(grad)).astype(grad.dtype)
        return jnp.where(jnp.any(grad != 0, axis=(-2, -1), keepdims=True), sign, 0 * grad)


class ProjectsOutside(Frobenius):
    def project(self, weight):
        return weight


class ProjectsInside(Frobenius):
    """Also scales weights with norm below 1."""

    def project(self, weight):
        return super().dualize(weight)


class ProjectsByScaling(MaxAbs):
    """Returns a weight in the ball that is not the nearest."""

    def project(self, weight):
        size = self.norm(weight)[..., None, None]
        return weight / jnp.where(size > 1, size, 1)


class EstimateTooLarge(Frobenius):
    def estimate(self, weight, vectors, iterations):
        return 1.1 * self.norm(weight), vectors


class EstimateTooSmall(Frobenius):
    def estimate(self, weight, vectors, iterations):
        return 0.5 * self.norm(weight), vectors


class EstimateAddsVectors(Frobenius):
    """Changes the structure of its state, so the second call compiles again."""

    def estimate(self, weight, vectors, iterations):
        return self.norm(weight), self.norm(weight)


class FastIsAnother(Frobenius):
    def for_training(self):
        return Frobenius(scale=2.0)


class FastOverConfident(Frobenius):
    def for_training(self):
        return OverConfident()


BROKEN = [
    (EstimateAddsVectors, r"1\. law broken: estimate keeps the structure"),
    (Overflows, r"2\. law broken: norm\(c w\) == c norm\(w\)"),
    (NotNormalised, r"3\. law broken: norm\(dualize\(g\)\) == 1"),
    (WrongDual, r"3\. law broken: <g, dualize\(g\)> == dual_norm\(g\)"),
    (OverConfident, r"3\. law broken: norm\(dualize\(g\)\) == 1"),
    (FillsRank, r"3\. law broken: dualize\(g\) is the shortest"),
    (FillsZeros, r"3\. law broken: dualize\(g\) is the shortest"),
    (GapOfZero, r"4\. law broken: gap bounds .* at dualize\(g\) / 2"),
    (GapByLength, r"4\. law broken: gap bounds .* at dualize of one block"),
    (SignOfZero, r"5\. law broken: dualize of zero is zero"),
    (BoundTooSmall, r"6\. law broken: norm\(w\) <= bound\(w\)"),
    (BoundTooLarge, r"6\. law broken: bound\(w\) <= 2 norm\(w\)"),
    (EstimateTooLarge, r"6\. law broken: estimate\(w\) <= norm\(w\)"),
    (EstimateTooSmall, r"6\. law broken: estimate\(w\) >= 0.8 norm\(w\)"),
    (ProjectsOutside, r"7\. law broken: norm\(project\(w\)\) <= 1"),
    (ProjectsInside, r"7\. law broken: project keeps weights"),
    (ProjectsByScaling, r"7\. law broken: project\(w\) is the nearest"),
    (FastIsAnother, r"8\. law broken: fast\(\) is the same norm"),
    (FastOverConfident, r"8\. law broken: fast\(\): gap bounds"),
    (SwallowsNaN, r"9\. law broken: a NaN stays visible \(dualize\)"),
]


@pytest.mark.parametrize(("broken", "law"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_broken_norm_is_found(broken, law):
    with pytest.raises(AssertionError, match=law):
        check_norm(broken(), (4, 3), jax.random.key(0), thorough=False)


def test_invalid_gap_is_found():
    """The loss allowed to a method must show in its gap."""
    with pytest.raises(AssertionError, match=r"4\. law broken: gap bounds 1 - <g, a>"):
        check_norm(OverConfident(), (4, 3), jax.random.key(0), loss=0.2, thorough=False)
