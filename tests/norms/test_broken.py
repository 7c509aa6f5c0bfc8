"""`check_norm` detects norms with a single defect and names the broken law."""

import jax
import jax.numpy as jnp
import pytest

from manifoldmuon.norms import Frobenius, MaxAbs, Spectral
from manifoldmuon.testing import check_norm
from tests.broken import broken, doubled_in_vmap


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
OVERCONFIDENT = {
    "dualize": lambda sound, grad: 0.9 * sound.dualize(grad),
    "gap": lambda sound, grad, direction: 0 * sound.gap(grad, direction),
}
# fmt: off
BROKEN = {  # norms, and the methods with a defect
    # The structure of the state changes, so the second call compiles again.
    "estimate adds vectors": (Frobenius(), {"estimate": lambda s, w, *_: (s.norm(w), s.norm(w))},
                              "1. law broken: estimate keeps the structure"),
    "overflows": (Frobenius(), {"norm": lambda s, w: jnp.sqrt(jnp.sum(w**2, axis=(-2, -1)))},
                  r"2. law broken: norm\(c w\) == c norm\(w\)"),
    "not normalised": (Frobenius(), {"dualize": lambda s, g: g},
                       r"3. law broken: norm\(dualize\(g\)\) == 1"),
    "wrong dual": (MaxAbs(), {"dual_norm": lambda s, g: jnp.max(jnp.abs(g), axis=(-2, -1))},
                   r"3. law broken: <g, dualize\(g\)> == dual_norm\(g\)"),
    "overconfident": (Frobenius(), OVERCONFIDENT, r"3. law broken: norm\(dualize\(g\)\) == 1"),
    "fills rank": (Spectral(), {"dualize": fill_rank},
                   r"3. law broken: dualize\(g\) is the shortest"),
    "fills zeros": (MaxAbs(), {"dualize": fill_zeros},
                    r"3. law broken: dualize\(g\) is the shortest"),
    # Correct only for `dualize`, which is exact.
    "gap of zero": (Frobenius(), {"gap": lambda s, *x: 0 * s.gap(*x)},
                    r"4. law broken: gap bounds .* at dualize\(g\) / 2"),
    "gap by length": (Spectral(), {"gap": gap_by_length},
                      "4. law broken: gap bounds .* at dualize of one block"),
    "sign of zero": (MaxAbs(),
                     {"dualize": lambda s, g: jnp.where(g >= 0, 1.0, -1.0).astype(g.dtype)},
                     "5. law broken: dualize of zero is zero"),
    # Shortened steps stay twice too long, or vanish.
    "bound too small": (Frobenius(), {"bound": lambda s, w: 0.5 * s.bound(w)},
                        r"6. law broken: norm\(w\) <= bound\(w\)"),
    "bound too large": (Frobenius(), {"bound": lambda s, w: 100 * s.bound(w)},
                        r"6. law broken: bound\(w\) <= 2 norm\(w\)"),
    "estimate too large": (Frobenius(), {"estimate": lambda s, w, v, _: (1.1 * s.norm(w), v)},
                           r"6. law broken: estimate\(w\) <= norm\(w\)"),
    "estimate too small": (Frobenius(), {"estimate": lambda s, w, v, _: (0.5 * s.norm(w), v)},
                           r"6. law broken: estimate\(w\) >= 0.8 norm\(w\)"),
    "projects outside": (Frobenius(), {"project": lambda s, w: w},
                         r"7. law broken: norm\(project\(w\)\) <= 1"),
    # It also scales weights with norm below 1.
    "projects inside": (Frobenius(), {"project": lambda s, w: s.dualize(w)},
                        "7. law broken: project keeps weights"),
    "projects by scaling": (MaxAbs(), {"project": scale_down},
                            r"7. law broken: project\(w\) is the nearest"),
    "fast is another": (Frobenius(), {"for_training": lambda s: Frobenius(scale=2.0)},
                        r"8. law broken: for_training\(\) is the same norm"),
    "fast overconfident": (Frobenius(), {"for_training": lambda s: broken(s, **OVERCONFIDENT)},
                           r"8. law broken: for_training\(\): gap bounds"),
    "swallows NaN": (Frobenius(), {"dualize": lambda s, g: s.dualize(jnp.nan_to_num(g))},
                     r"9. law broken: a NaN stays visible \(dualize\)"),
}
QUICK = ("estimate adds vectors", "overflows", "wrong dual", "fills zeros", "gap of zero",
         "sign of zero", "bound too small", "projects by scaling", "fast is another",
         "swallows NaN")
# fmt: on


@pytest.mark.slow_except(*QUICK)  # the others break a law that has one of these
@pytest.mark.parametrize("defect", BROKEN)
def test_broken_norm_is_found(defect):
    norm, methods, law = BROKEN[defect]
    with pytest.raises(AssertionError, match=law):
        check_norm(broken(norm, **methods), (4, 3), jax.random.key(0), thorough=False)


def test_invalid_gap_is_found():
    """The loss allowed to a method must show in its gap."""
    norm = broken(Frobenius(), **OVERCONFIDENT)
    with pytest.raises(AssertionError, match="4. law broken: gap bounds 1 - <g, a>"):
        check_norm(norm, (4, 3), jax.random.key(0), loss=0.2, thorough=False)


class Remembers(Frobenius):
    """Estimate the norm of the previous weight, right only while the weight is the same."""

    def init_vectors(self, shape):
        return jnp.zeros(shape[:-2], jnp.float32)

    def estimate(self, weight, vectors, iterations):
        size = self.norm(weight)
        known = (vectors > 0) & (size > 0)
        return jnp.where(known, vectors.astype(size.dtype), size), size.astype(jnp.float32)


def doubled_in_bf16(sound, weight):
    return sound.norm(weight) * (2 if weight.dtype == jnp.bfloat16 else 1)


THOROUGH = {
    "norm in bf16": (
        broken(Frobenius(), norm=doubled_in_bf16),
        r"1. law broken: bf16: float32 .* \(size\)",
    ),
    "remembers": (Remembers(), r"6. law broken: estimate\(w\) .* norm\(w\).*, from other vectors"),
    "vmap": (
        broken(Frobenius(), norm=lambda s, w: doubled_in_vmap(s.norm(w))),
        r"9. law broken: vmap = loop \(size\)",
    ),
}


@pytest.mark.slow_except("remembers")
@pytest.mark.parametrize("defect", THOROUGH)
def test_rarely_broken_norm_is_found(defect):
    """Only thorough checks see a defect under vmap, in bfloat16 or after a change of the weight."""
    norm, law = THOROUGH[defect]
    check_norm(norm, (4, 3), jax.random.key(0), thorough=False)
    with pytest.raises(AssertionError, match=law):
        check_norm(norm, (4, 3), jax.random.key(0))
