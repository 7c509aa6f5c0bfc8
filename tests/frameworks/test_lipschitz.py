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


def check(kernels, function, params, entry, shape, disjoint):
    """Check the norm of the map with random kernels and a nearly averaging kernel."""
    shapes = {name: x.shape for name, x in params.items()}
    flat = jax.jit(
        lambda w: jax.jacobian(lambda x: jnp.ravel(function(w, x.reshape(shape))))(
            jnp.zeros(np.prod(shape))
        )
    )
    found = []
    for w in kernels(shapes):
        w = optim.project_tree(entry, w)
        found.append(np.linalg.norm(np.asarray(flat(w), np.float64), 2))
    assert max(found) <= 1 + 1e-5
    assert not disjoint or max(found) >= 1 - 1e-5
    return found


def kernels(shapes):
    keys = jax.random.split(jax.random.key(0), 3)
    yield from ({n: jax.random.normal(key, s) for n, s in shapes.items()} for key in keys)
    # Nearly rank 1 before projection: stretches constant images the most.
    yield {n: 1 + 1e-3 * jax.random.normal(keys[0], s) for n, s in shapes.items()}


def is_disjoint(kernel, stride, dilation, padding):
    return kernel == stride and dilation == 1 and padding != "CIRCULAR"


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_linen_convolutions_have_norm_at_most_one(case, transposed):
    nn = pytest.importorskip("flax.linen")
    read = pytest.importorskip("manifoldmuon.frameworks.linen").geometry
    kernel, stride, dilation, padding, groups = case
    options = {"strides": stride, "kernel_dilation": dilation, "padding": padding}
    shape = (1, *(6,) * len(kernel), 2)
    if transposed:
        model = nn.ConvTranspose(1, kernel, use_bias=False, **options)
    else:
        model = nn.Conv(2, kernel, feature_group_count=groups, use_bias=False, **options)
    entry = read(model, (jnp.ones(shape),), SPACE)
    params = model.init(jax.random.key(0), jnp.ones(shape))["params"]
    apply = lambda w, x: model.apply({"params": w}, x)  # noqa: E731
    check(kernels, apply, params, entry, shape, is_disjoint(*case[:4]))


@pytest.mark.parametrize("case", CONVOLUTIONS[:6], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_haiku_convolutions_have_norm_at_most_one(case, transposed):
    hk = pytest.importorskip("haiku")
    read = pytest.importorskip("manifoldmuon.frameworks.haiku").geometry
    kernel, stride, dilation, padding, groups = case
    axes = len(kernel)
    shape = (1, *(6,) * axes, 2)
    stride = stride if dilation == 1 else 1

    def layer(x):
        if transposed:
            return hk.ConvNDTranspose(axes, 1, kernel, stride, padding=padding, with_bias=False)(x)
        return hk.ConvND(
            axes, 2, kernel, stride, dilation, padding, False, feature_group_count=groups
        )(x)

    model = hk.without_apply_rng(hk.transform(layer))
    params = model.init(jax.random.key(0), jnp.ones(shape))
    entry = read(model, (jnp.ones(shape),), SPACE)
    ((name, inner),) = params.items()
    entry = {n: entry[f"{name}/{n}"] for n in inner}
    apply = lambda w, x: model.apply({name: w}, x)  # noqa: E731
    check(kernels, apply, inner, entry, shape, is_disjoint(kernel, stride, dilation, padding))


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_equinox_convolutions_have_norm_at_most_one(case):
    eqx = pytest.importorskip("equinox")
    read = pytest.importorskip("manifoldmuon.frameworks.equinox").geometry
    kernel, stride, dilation, padding, groups = case
    mode = "CIRCULAR" if padding == "CIRCULAR" else "ZEROS"
    padding = "SAME" if padding == "CIRCULAR" else padding
    for kind in (eqx.nn.Conv, eqx.nn.ConvTranspose):
        if kind is eqx.nn.ConvTranspose:
            mode, groups = "ZEROS", 1
        model = kind(
            len(kernel), 2, 2, kernel, stride, padding=padding, dilation=dilation, groups=groups,
            padding_mode=mode, use_bias=False, key=jax.random.key(0),
        )  # fmt: skip
        entry = read(model, SPACE)
        apply = lambda w, x: eqx.tree_at(lambda m: m.weight, model, w["weight"])(x)  # noqa: B023, E731
        shape = (2, *(6,) * len(kernel))
        params = {"weight": model.weight}
        check(kernels, apply, params, entry, shape, is_disjoint(kernel, stride, dilation, mode))


def test_nnx_convolutions_have_norm_at_most_one():
    nnx = pytest.importorskip("flax.nnx")
    read = pytest.importorskip("manifoldmuon.frameworks.nnx").geometry
    for kind in (nnx.Conv, nnx.ConvTranspose):
        model = kind(2, 2, (4, 4), strides=2, use_bias=False, rngs=nnx.Rngs(0))

        def apply(w, x, model=model):
            return nnx.merge(nnx.graphdef(model), nnx.State({"kernel": nnx.Param(w["kernel"])}))(x)

        params = {"kernel": model.kernel[...]}
        found = check(kernels, apply, params, read(model, SPACE), (1, 6, 6, 2), False)
        assert max(found) > 0.7  # a scale of 1 / 4 would give half as much


def test_reflect_padding_is_refused():
    nnx = pytest.importorskip("flax.nnx")
    read = pytest.importorskip("manifoldmuon.frameworks.nnx").geometry
    model = nnx.Conv(2, 2, (3, 3), padding="REFLECT", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Lipschitz\(\) does not bound 'kernel'"):
        read(model, SPACE)
