"""Convolutions on `Stiefel(Lipschitz())`, against the norms of their linear maps."""

import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manifoldmuon import optim
from manifoldmuon.frameworks import _reading as reading
from manifoldmuon.frameworks import equinox as equinox_reader
from manifoldmuon.frameworks import linen as linen_reader
from manifoldmuon.frameworks import nnx as nnx_reader
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


# Convolutions from two channels to two, or to one if transposed, in each framework. Return the map,
# its kernel, the geometry and the shape of the images.


def linen(case, transposed, **how: Any):
    kernel, strides, dilation, padding, groups = case
    options: Any = {"kernel_dilation": dilation, "padding": padding, "use_bias": False}
    if transposed:
        model = nn.ConvTranspose(1, kernel, strides, **options)
    else:
        model = nn.Conv(2, kernel, strides, feature_group_count=groups, **options)
    shape = (1, *(6,) * len(kernel), 2)
    params = model.init(jax.random.key(0), jnp.ones(shape))["params"]
    entry = linen_reader.geometry(model, (jnp.ones(shape),), SPACE, **how)
    return lambda w, x: model.apply({"params": w}, x), params, entry, shape


def equinox(case, transposed, **how: Any):
    kernel, stride, dilation, padding, groups = case
    mode = "CIRCULAR" if padding == "CIRCULAR" and not transposed else "ZEROS"
    padding = "SAME" if padding == "CIRCULAR" else padding
    options: Any = {"padding": padding, "padding_mode": mode, "dilation": dilation}
    options |= {"use_bias": False, "key": jax.random.key(0)}
    if transposed:
        model = eqx.nn.ConvTranspose(len(kernel), 2, 1, kernel, stride, **options)
    else:
        model = eqx.nn.Conv(len(kernel), 2, 2, kernel, stride, groups=groups, **options)

    def apply(w, x):
        return eqx.tree_at(lambda m: m.weight, model, w["weight"])(x)

    entry = equinox_reader.geometry(model, SPACE, **how)
    return apply, {"weight": model.weight}, entry, (2, *(6,) * len(kernel))


def flax_nnx(case, transposed, **how: Any):
    kernel, stride, dilation, padding, groups = case
    options: Any = {"padding": padding, "kernel_dilation": dilation, "use_bias": False}
    options["rngs"] = nnx.Rngs(0)
    if transposed:
        model = nnx.ConvTranspose(2, 1, kernel, stride, **options)
    else:
        model = nnx.Conv(2, 2, kernel, stride, feature_group_count=groups, **options)

    def apply(w, x):
        return nnx.merge(nnx.graphdef(model), nnx.State({"kernel": nnx.Param(w["kernel"])}))(x)

    entry = nnx_reader.geometry(model, SPACE, **how)
    return apply, {"kernel": model.kernel[...]}, entry, (1, *(6,) * len(kernel), 2)


@pytest.mark.slow_except(
    "linen-False-((4, 4), (2, 2), 1, 'SAME', 1)", "linen-True-((2,), (2,), 1, 'CIRCULAR', 1)"
)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", [linen, equinox, flax_nnx])
def test_convolutions_have_norm_at_most_one(make, case, transposed):
    kernel, stride, dilation, padding, _ = case
    found = largest_norm(*make(case, transposed))
    assert found <= 1 + 1e-5
    if kernel == stride and dilation == 1 and padding != "CIRCULAR":  # separate patches
        assert found >= 1 - 1e-5
    if kernel == (4, 4) and make is flax_nnx:
        assert found > 0.7  # a scale of 1 / 4 would give half as much


def test_reflect_padding_is_refused():
    model = nnx.Conv(2, 2, (3, 3), padding="REFLECT", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Lipschitz\(\) does not bound 'kernel'"):
        nnx_reader.geometry(model, SPACE)
