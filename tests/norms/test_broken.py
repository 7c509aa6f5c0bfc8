"""`check_norm` detects norms with a single defect and names the broken law."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.norms import Frobenius, MaxAbs, Spectral
from manifoldmuon.testing import check_norm
from tests.broken import broken


def nonzero(grad):
    return jnp.any(grad != 0, axis=(-2, -1), keepdims=True)


def fill_rank(sound, grad):
    """Also set zero singular values to 1, as the bare decomposition does."""
    left, _, right = jnp.linalg.svd(grad, full_matrices=False)
    return jnp.where(nonzero(grad), left @ right, 0)


def fill_zeros(sound, grad):
    """Give zero entries the sign 1, unless all entries are zero."""
    sign = jnp.where(grad >= 0, 1.0, jnp.sign(grad)).astype(grad.dtype)
    return jnp.where(nonzero(grad), sign, 0 * grad)


def gap_by_length(sound, grad, direction):
    """Give every direction of norm 1 a gap of zero."""
    missed = 1 - jnp.linalg.norm(direction.astype(jnp.float32), 2, axis=(-2, -1))
    return jnp.where(nonzero(grad)[..., 0, 0], jnp.maximum(missed, 0), 0)


def scale_down(sound, weight):
    """Return a weight in the ball that is not the nearest."""
    return weight / jnp.maximum(sound.norm(weight), 1)[..., None, None]


# Nine tenths of the best direction with a gap of zero.
OVERCONFIDENT = broken(
    Frobenius(),
    dualize=lambda sound, grad: 0.9 * sound.dualize(grad),
    gap=lambda sound, grad, direction: 0 * sound.gap(grad, direction),
)
BROKEN = {
    "estimate adds vectors": (
        # The structure of the state changes, so the second call compiles again.
        broken(Frobenius(), estimate=lambda sound, w, *_: (sound.norm(w), sound.norm(w))),
        r"1\. law broken: estimate keeps the structure",
    ),
    "overflows": (
        broken(Frobenius(), norm=lambda _, w: jnp.sqrt(jnp.sum(w**2, axis=(-2, -1)))),
        r"2\. law broken: norm\(c w\) == c norm\(w\)",
    ),
    "not normalised": (
        broken(Frobenius(), dualize=lambda _, grad: grad),
        r"3\. law broken: norm\(dualize\(g\)\) == 1",
    ),
    "wrong dual": (
        broken(MaxAbs(), dual_norm=lambda _, grad: jnp.max(jnp.abs(grad), axis=(-2, -1))),
        r"3\. law broken: <g, dualize\(g\)> == dual_norm\(g\)",
    ),
    "overconfident": (OVERCONFIDENT, r"3\. law broken: norm\(dualize\(g\)\) == 1"),
    "fills rank": (
        broken(Spectral(), dualize=fill_rank),
        r"3\. law broken: dualize\(g\) is the shortest",
    ),
    "fills zeros": (
        broken(MaxAbs(), dualize=fill_zeros),
        r"3\. law broken: dualize\(g\) is the shortest",
    ),
    "gap of zero": (
        # Correct only for `dualize`, which is exact.
        broken(Frobenius(), gap=lambda sound, *x: 0 * sound.gap(*x)),
        r"4\. law broken: gap bounds .* at dualize\(g\) / 2",
    ),
    "gap by length": (
        broken(Spectral(), gap=gap_by_length),
        r"4\. law broken: gap bounds .* at dualize of one block",
    ),
    "sign of zero": (
        broken(MaxAbs(), dualize=lambda _, g: jnp.where(g >= 0, 1.0, -1.0).astype(g.dtype)),
        r"5\. law broken: dualize of zero is zero",
    ),
    "bound too small": (  # shortened steps stay twice too long
        broken(Frobenius(), bound=lambda sound, w: 0.5 * sound.bound(w)),
        r"6\. law broken: norm\(w\) <= bound\(w\)",
    ),
    "bound too large": (  # shortened steps vanish
        broken(Frobenius(), bound=lambda sound, w: 100 * sound.bound(w)),
        r"6\. law broken: bound\(w\) <= 2 norm\(w\)",
    ),
    "estimate too large": (
        broken(Frobenius(), estimate=lambda sound, w, v, _: (1.1 * sound.norm(w), v)),
        r"6\. law broken: estimate\(w\) <= norm\(w\)",
    ),
    "estimate too small": (
        broken(Frobenius(), estimate=lambda sound, w, v, _: (0.5 * sound.norm(w), v)),
        r"6\. law broken: estimate\(w\) >= 0.8 norm\(w\)",
    ),
    "projects outside": (
        broken(Frobenius(), project=lambda _, w: w),
        r"7\. law broken: norm\(project\(w\)\) <= 1",
    ),
    "projects inside": (  # also scales weights with norm below 1
        broken(Frobenius(), project=lambda sound, w: sound.dualize(w)),
        r"7\. law broken: project keeps weights",
    ),
    "projects by scaling": (
        broken(MaxAbs(), project=scale_down),
        r"7\. law broken: project\(w\) is the nearest",
    ),
    "fast is another": (
        broken(Frobenius(), for_training=lambda _: Frobenius(scale=2.0)),
        r"8\. law broken: for_training\(\) is the same norm",
    ),
    "fast overconfident": (
        broken(Frobenius(), for_training=lambda _: OVERCONFIDENT),
        r"8\. law broken: for_training\(\): gap bounds",
    ),
    "swallows NaN": (
        broken(Frobenius(), dualize=lambda sound, grad: sound.dualize(jnp.nan_to_num(grad))),
        r"9\. law broken: a NaN stays visible \(dualize\)",
    ),
}


# The others break a law that has one of these.
@pytest.mark.slow_except(
    "estimate adds vectors",
    "overflows",
    "wrong dual",
    "fills zeros",
    "gap of zero",
    "sign of zero",
    "bound too small",
    "projects by scaling",
    "fast is another",
    "swallows NaN",
)
@pytest.mark.parametrize("defect", BROKEN)
def test_broken_norm_is_found(defect):
    norm, law = BROKEN[defect]
    with pytest.raises(AssertionError, match=law):
        check_norm(norm, (4, 3), jax.random.key(0), thorough=False)


def test_invalid_gap_is_found():
    """The loss allowed to a method must show in its gap."""
    with pytest.raises(AssertionError, match=r"4\. law broken: gap bounds 1 - <g, a>"):
        check_norm(OVERCONFIDENT, (4, 3), jax.random.key(0), loss=0.2, thorough=False)
