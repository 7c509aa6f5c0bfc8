"""Convolutions on `Stiefel(Lipschitz())`, against the norms of their linear maps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import optim
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.norms import Lipschitz

SPACE = Stiefel(Lipschitz())
# kernel, stride, dilation, padding, groups
CONVOLUTIONS = [
    ((4, 4), (2, 2), 1, "SAME", 1),
    ((3, 2), (1, 2), 1, "SAME", 1),
    ((3, 3), (2, 2), 1, "VALID", 2),
    ((3,), (2,), 2, "SAME", 1),
    ((3,), (3,), 2, "VALID", 1),
    ((2, 2), (2, 2), 1, "VALID", 1),
    ((3,), (1,), 1, "CIRCULAR", 1),
    ((2,), (2,), 1, "CIRCULAR", 1),
]


@pytest.mark.parametrize("padding", ["ZEROS", "CIRCULAR"])
def test_overlap_bounds_reads_per_pixel(padding):
    """Count by index arithmetic; the bound is exact for zero padding and large images."""
    for k, s, d in itertools.product(range(1, 6), range(1, 5), range(1, 4)):
        counts = []
        for n in range(1, 40):
            seen = np.zeros(n, int)
            start = -((k - 1) * d) // 2
            for p, t in itertools.product(range(-(-n // s)), range(k)):
                at = start + p * s + t * d
                if padding == "CIRCULAR" or 0 <= at < n:
                    seen[at % n] += 1
            counts.append(seen.max())
        found = reading.overlap((k,), s, d, padding)
        assert max(counts) <= found
        assert padding == "CIRCULAR" or max(counts) == found


def largest_norm(function, params, entry, shape):
    """Return the largest norm of the map with random kernels and a nearly averaging kernel."""
    flat = jax.jit(
        lambda w: jax.jacobian(lambda x: jnp.ravel(function(w, x.reshape(shape))))(
            jnp.zeros(np.prod(shape))
        )
    )
    found = []
    for key in jax.random.split(jax.random.key(0), 3):
        drawn = {n: jax.random.normal(key, x.shape) for n, x in params.items()}
        # Nearly rank 1 before projection: stretches constant images the most.
        for w in (drawn, {n: 1 + 1e-3 * x for n, x in drawn.items()}):
            projected = optim.project_tree(entry, w)
            found.append(np.linalg.norm(np.asarray(flat(projected), np.float64), 2))
    return max(found)


def linen(case, transposed):
    nn = pytest.importorskip("flax.linen")
    read = pytest.importorskip("manifoldmuon.frameworks.linen").geometry
    kernel, stride, dilation, padding, groups = case
    options = {"strides": stride, "kernel_dilation": dilation, "padding": padding}
    shape = (1, *(6,) * len(kernel), 2)
    if transposed:
        model = nn.ConvTranspose(1, kernel, use_bias=False, **options)
    else:
        model = nn.Conv(2, kernel, feature_group_count=groups, use_bias=False, **options)
    params = model.init(jax.random.key(0), jnp.ones(shape))["params"]
    entry = read(model, (jnp.ones(shape),), SPACE)
    return lambda w, x: model.apply({"params": w}, x), params, entry, shape


def equinox(case, transposed):
    eqx = pytest.importorskip("equinox")
    read = pytest.importorskip("manifoldmuon.frameworks.equinox").geometry
    kernel, stride, dilation, padding, groups = case
    mode = "CIRCULAR" if padding == "CIRCULAR" and not transposed else "ZEROS"
    padding = "SAME" if padding == "CIRCULAR" else padding
    model = (eqx.nn.ConvTranspose if transposed else eqx.nn.Conv)(
        len(kernel), 2, 2, kernel, stride, padding=padding, dilation=dilation,
        groups=1 if transposed else groups, padding_mode=mode, use_bias=False,
        key=jax.random.key(0),
    )  # fmt: skip
    shape = (2, *(6,) * len(kernel))

    def apply(w, x):
        return eqx.tree_at(lambda m: m.weight, model, w["weight"])(x)

    return apply, {"weight": model.weight}, read(model, SPACE), shape


def nnx(case, transposed):
    nnx = pytest.importorskip("flax.nnx")
    read = pytest.importorskip("manifoldmuon.frameworks.nnx").geometry
    kernel, stride, dilation, padding, groups = case
    options = {} if transposed else {"feature_group_count": groups}
    model = (nnx.ConvTranspose if transposed else nnx.Conv)(
        2, 2, kernel, stride, padding=padding, kernel_dilation=dilation, use_bias=False,
        rngs=nnx.Rngs(0), **options,
    )  # fmt: skip

    def apply(w, x):
        return nnx.merge(nnx.graphdef(model), nnx.State({"kernel": nnx.Param(w["kernel"])}))(x)

    return apply, {"kernel": model.kernel[...]}, read(model, SPACE), (1, *(6,) * len(kernel), 2)


@pytest.mark.slow_except(
    "linen-False-((4, 4), (2, 2), 1, 'SAME', 1)", "linen-True-((2,), (2,), 1, 'CIRCULAR', 1)"
)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", [linen, equinox, nnx])
def test_convolutions_have_norm_at_most_one(make, case, transposed):
    kernel, stride, dilation, padding, _ = case
    found = largest_norm(*make(case, transposed))
    assert found <= 1 + 1e-5
    if kernel == stride and dilation == 1 and padding != "CIRCULAR":  # separate patches
        assert found >= 1 - 1e-5
    if kernel == (4, 4) and make is nnx:
        assert found > 0.7  # a scale of 1 / 4 would give half as much


def test_reflect_padding_is_refused():
    nnx = pytest.importorskip("flax.nnx")
    read = pytest.importorskip("manifoldmuon.frameworks.nnx").geometry
    model = nnx.Conv(2, 2, (3, 3), padding="REFLECT", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Lipschitz\(\) does not bound 'kernel'"):
        read(model, SPACE)
