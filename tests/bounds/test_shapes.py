"""Broadcast and mismatched shapes: refused by modules, or covered by their bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

from benchmarks._bounds import weights_of
from manifoldmuon.bounds import L2, RMS, LInf, NormBound, bound
from manifoldmuon.contrib import (
    Householder,
    LocallyConnected,
    NormPool,
    Shift,
    SpaceToDepth,
    SwapAxes,
    TwoTap,
)
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.modules import (
    Abs,
    Add,
    AveragePool,
    Bias,
    Conv2D,
    Flatten,
    FunctionalAttention,
    GroupSort,
    Identity,
    Linear,
    MergeHeads,
    RoPE,
    SplitHeads,
    Unembed,
)
from manifoldmuon.robustness import certify
from tests.bounds.slopes import input_slope

FRAMES = Stiefel()
COPIED = Linear(2, 8, FRAMES) @ (Identity() + Linear(1, 8, FRAMES))
SHRUNK = Identity() + Conv2D(1, 1, 2, padding=0)


@pytest.mark.parametrize(
    ("net", "shape"),
    [(COPIED, (3, 8)), (SHRUNK, (1, 2, 2, 1))],
    ids=["features", "pixels"],
)
def test_add_of_unequal_shapes_is_refused(net, shape):
    """Broadcasting counts an entry several times in L2: the slope is 1 + sqrt(8), not 2."""
    with pytest.raises(ValueError, match=r"Add takes terms of one shape; got \("):
        jax.eval_shape(net.apply, net.init(jax.random.key(0)), jnp.ones(shape))


def test_certify_refuses_a_copied_feature(rng):
    images = rng.normal(size=(4, 8)).astype(np.float32)
    with pytest.raises(ValueError, match=r"got \(4, 8\) and \(4, 1\)"):
        certify(COPIED, weights_of(COPIED), images)


@pytest.mark.parametrize(
    "shapes", [((3, 4), (1, 4)), ((3, 4), (4,)), ((), (1,)), ((4,), (4,), (1,))], ids=str
)
def test_add_broadcasts_no_axis(shapes):
    with pytest.raises(ValueError, match="one shape"):
        Add().forward(tuple(map(jnp.ones, shapes)))


def test_add_with_mismatched_third_term_is_refused():
    """The first term has an unknown length."""
    with pytest.raises(ValueError, match="expected 1 entries .* got 8"):
        bound(Add() @ (Flatten(2), Linear(8, 6) @ Flatten(1), Linear(1, 6) @ Flatten(1)))


@pytest.mark.parametrize(
    "atom",
    [
        Linear(3, 6),
        Bias(6),
        Unembed(3, 6),
        Conv2D(3, 6),
        Householder(6),
        TwoTap(6, 2),
        LocallyConnected((4,), 3, 6),
        LocallyConnected((6, 4), 3, 6),
    ],
    ids=repr,
)
def test_atoms_broadcast_no_axis(atom):
    params = atom.init(jax.random.key(0))
    jax.eval_shape(atom.apply, params, jnp.ones((6, 4, 6)))
    wrong = [(6, 4, 1), (6, 4, 5), (6, 4, 12)]
    if isinstance(atom, LocallyConnected):
        wrong += [(6, 1, 6), (6, 2, 6)]
    for shape in wrong:
        with pytest.raises(ValueError, match="takes"):
            jax.eval_shape(atom.apply, params, jnp.ones(shape))


UNIT = NormBound(1.0, features=6)
HEADS = NormBound(1.0, norm=RMS(2), features=3)
T, H = (4, 6), (2, 4, 3)


@pytest.mark.parametrize(
    ("bond", "sizes", "shapes"),
    [
        (FunctionalAttention(False), (UNIT,) * 3, ((1, 6), (2, *T), T)),
        (FunctionalAttention(), (UNIT,) * 3, ((1, 6), T, T)),
        (FunctionalAttention(False), (HEADS,) * 3, (H, (3, *H), H)),
        (FunctionalAttention(False), (HEADS, UNIT, UNIT), (H, (4, 3), (4, 3))),
    ],
)
def test_broadcast_attention_stays_within_bound(monkeypatch, bond, sizes, shapes):
    """Norms that take the maximum over tokens do not count copies twice."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as for users
    sizes = tuple(
        NormBound(s.upper, norm=s.norm, features=shape[-1])
        for s, shape in zip(sizes, shapes, strict=True)
    )
    found = bound(bond, input_norm=sizes)
    worst = input_slope(bond.forward, sizes, found.outputs, shapes)
    assert 0.1 * found.lipschitz_inputs <= worst <= found.lipschitz_inputs * (1 + 1e-4)


def smallest(measure, y):
    """Return the norm of the smallest token, pixel or image."""
    match measure:
        case RMS(heads):
            return np.sqrt(np.mean(y**2, axis=(-1,) if heads == 1 else (-3, -1))).min()
        case L2(axes):
            return np.sqrt(np.sum(y**2, axis=tuple(range(-axes, 0)))).min()
        case LInf():
            return np.abs(y).max(axis=-1).min()
    raise NotImplementedError(measure)


KEEPERS = [
    Abs(),
    Identity(),
    -1.5 * Identity(),
    Identity() + 0.25 * Abs(),
    GroupSort(2),
    Shift(),
    SwapAxes(),
    SpaceToDepth(2),
    NormPool(2),
    AveragePool(2, 2),
    Flatten(2),
    Flatten(3),
    RoPE(),
    SplitHeads(3),
    MergeHeads(),
    MergeHeads() @ SplitHeads(3),
    Linear(8, 6, FRAMES),
    Bias(6),
]


@pytest.mark.parametrize("net", KEEPERS, ids=repr)
def test_outputs_stay_above_lower_bound(rng, net):
    """Inputs have the smallest declared size and a single nonzero entry per pixel."""
    params = weights_of(net)
    apply = jax.jit(net.apply)
    for measure in (RMS(), LInf(), L2(1), L2(2), L2(3)):
        size = NormBound(1.0, 1.0, measure, features=6)
        outputs = bound(net, params, input_norm=size).outputs
        for _ in range(5):
            x = rng.choice([-1.0, 1.0], (4, 4, 1)) * np.eye(6)[rng.integers(6, size=(4, 4))]
            axes = tuple(range(-measure.axes, 0)) if isinstance(measure, L2) else -1
            total = np.sum if isinstance(measure, L2) else np.mean
            if measure != LInf():
                x /= np.sqrt(total(x**2, axis=axes, keepdims=True))
            y = np.asarray(apply(params, x.astype(np.float32)), np.float64)
            assert smallest(outputs.norm, y) >= outputs.lower * (1 - 1e-5)
