"""Bounds in the Euclidean norm against Jacobians; lower bounds; axes that do not fit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import contrib, modules
from manifoldmuon.bounds import L2, RMS, LInf, NormBound, bound
from manifoldmuon.bounds._norm_bounds import factor_between
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.modules import Abs, AveragePool, Bias, Flatten, GroupSort, Identity, Linear, ReLU
from manifoldmuon.robustness import certify
from tests.bounds.slopes import check_outputs, random_weights
from tests.modules.measure import gaussian, random_like
from tests.oracles.bounds import weights_of

IMAGE, TOKENS, VECTOR = (4, 4, 6), (5, 6), (6,)
FRAMES = Stiefel()
COPIED = Linear(2, 8, FRAMES) @ (Identity() + Linear(1, 8, FRAMES))
SHRUNK = Identity() + modules.Conv2D(1, 1, 2, padding=0)
FREE = Linear(4, 6)

# module, input shape, least fraction of the bound that the search attains; random weights.
MODULES = {
    "Identity": (Identity(), TOKENS, 1),
    "Linear": (FREE, VECTOR, 1),
    "Linear of tokens": (FREE, TOKENS, 1),
    "Linear of images": (FREE, IMAGE, 1),
    "LocallyConnected": (contrib.LocallyConnected((4, 4), 5, 6), IMAGE, 1),
    "LocallyConnected of rows": (contrib.LocallyConnected((4,), 7, 6), IMAGE, 1),
    "Conv2D": (modules.Conv2D(2, 6, 3), IMAGE, 0.3),
    "Conv2D with stride": (modules.Conv2D(2, 6, 2, stride=2, padding=0), IMAGE, 0.3),
    "Bias": (Bias(6), TOKENS, 1),
    "TwoTap": (contrib.TwoTap(6, 2), TOKENS, 0.5),
    "TwoTap of rows": (contrib.TwoTap(6, 2, axis=-3), IMAGE, 0.5),
    "orthogonal convolution": (contrib.orthogonal_conv2d(6, 2), IMAGE, 0.1),
    "GroupSort": (GroupSort(3), TOKENS, 1),
    "SpaceToDepth": (contrib.SpaceToDepth(2), IMAGE, 1),
    "AveragePool": (AveragePool(2, 2), IMAGE, 0.49),
    "Shift": (contrib.Shift(), IMAGE, 1),
    "Flatten": (Flatten(3), IMAGE, 1),
    "Flatten of some": (Flatten(2), IMAGE, 1),
    "MeanSubtract": (modules.MeanSubtract(), IMAGE, 1),
    "Abs": (Abs(), TOKENS, 1),
    "ReLU": (ReLU(), TOKENS, 1),
    "scaled ReLU": (math.sqrt(2) * ReLU(), TOKENS, 1),
    "GELU": (modules.GELU(), TOKENS, 0.8),
    "residual": (modules.residual(GroupSort(2) @ Linear(6, 6), 2), VECTOR, 0.2),
    "deep": (FREE @ Flatten(3) @ AveragePool(1, 1) @ Abs() @ Linear(6, 6) @ Bias(6), IMAGE, 0.1),
}


@pytest.mark.parametrize("name", MODULES)
def test_jacobians_stay_within_bound(name):
    net, shape, share = MODULES[name]
    params = random_weights(net)
    found = bound(net, params, input_norm=NormBound(math.inf, norm=L2(len(shape))))
    assert isinstance(found.outputs.norm, L2)
    slope = jax.jit(jax.jacobian(lambda x: net.apply(params, x)))
    worst = 0.0
    for seed in range(10):
        x = 2 * gaussian(seed, *shape)
        matrix = np.asarray(slope(x), np.float64).reshape(-1, x.size)
        worst = max(worst, np.linalg.norm(matrix, 2))
    most = found.lipschitz_inputs
    assert share * most * (1 - 1e-5) <= worst <= most * (1 + 1e-5)


def test_outputs_stay_within_norm_bound():
    check_outputs({
        name: (net, random_weights(net), NormBound(3.0, norm=L2(len(shape))), shape)
        for name, (net, shape, _) in MODULES.items()
    })  # fmt: skip


STEPPED = [Bias(6), contrib.TwoTap(6, 2), Linear(4, 6), contrib.LocallyConnected((3,), 4, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("atom", STEPPED, ids=repr)
def test_weight_steps_stay_within_bound(atom):
    """Try random steps, and gradients of random outputs, at weights off the manifolds."""
    params = random_weights(atom)
    x = gaussian(5, 3, 6)
    x = x / np.linalg.norm(x)
    size = NormBound(1.0, norm=L2(1 if isinstance(atom, Bias) else 2))
    found = bound(atom, params, input_norm=size)

    def apply(w):
        return atom.apply(w, x[0] if isinstance(atom, Bias) else x)

    y, pull = jax.vjp(apply, params)
    worst = 0.0
    for seed in range(20):
        for step in (*pull(gaussian(seed, *y.shape)), random_like(params, seed)):
            moved = jax.jvp(apply, (params,), (step,))[1]
            worst = max(worst, float(np.linalg.norm(moved) / atom.norm(step)))
    assert 0.1 * found.lipschitz_weights < worst <= found.lipschitz_weights * (1 + 1e-5)


def test_orthonormal_network_has_lipschitz_constant_one():
    net = Linear(3, 32, Stiefel()) @ Flatten(3) @ GroupSort(2) @ contrib.orthogonal_conv2d(8, 3)
    net = net @ GroupSort(2) @ Bias(8) @ Linear(8, 4, Stiefel()) @ contrib.SpaceToDepth(2)
    everywhere = bound(net, input_norm=NormBound(math.inf, norm=L2(3)))
    assert everywhere.lipschitz_inputs == pytest.approx(1, abs=1e-12)
    params = net.init(jax.random.key(0))
    here = bound(net, params, input_norm=NormBound(math.inf, norm=L2(3)))
    assert here.lipschitz_inputs == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: factor_between(NormBound(1.0), L2()), "length of the last axis"),
        (lambda: factor_between(NormBound(1.0, norm=L2()), L2(2)), "L2\\(axes=2\\)"),
        (lambda: factor_between(NormBound(1.0, norm=RMS(2)), L2()), "needs the lengths of the"),
        (lambda: L2(0), "axes"),
    ],
)
def test_unknown_l2_conversions_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bias_on_tokens_has_no_l2_output_bound():
    """Every token gets the bias: the output norm is unbounded, the slope is not."""
    net = Linear(4, 6, Stiefel()) @ Bias(6)
    params = (jnp.ones(6), weights_of(Linear(4, 6, Stiefel())))
    found = bound(net, params, input_norm=NormBound(1.0, norm=L2(2)))
    assert found.output_norm == math.inf
    assert found.lipschitz_inputs == pytest.approx(np.linalg.norm(params[1], 2), rel=1e-6)
    assert any("unknown number of positions" in reason for reason in found.reasons)


def test_add_of_unequal_shapes_is_refused(rng):
    """Broadcasting counts an entry several times in L2: the slope is 1 + sqrt(8), not 2."""
    for shapes in (((3, 4), (1, 4)), ((3, 4), (4,)), ((), (1,)), ((4,), (4,), (1,))):
        with pytest.raises(ValueError, match=r"Add takes terms of equal shape; got \("):
            modules.Add().forward(tuple(map(jnp.ones, shapes)))
    with pytest.raises(ValueError, match="Add takes terms of equal shape"):
        jax.eval_shape(SHRUNK.apply, SHRUNK.init(jax.random.key(0)), jnp.ones((1, 2, 2, 1)))
    images = rng.normal(size=(4, 8)).astype(np.float32)
    with pytest.raises(ValueError, match=r"got \(4, 8\) and \(4, 1\)"):
        certify(COPIED, weights_of(COPIED), images)


def test_add_with_mismatched_third_term_is_refused():
    """The first term has an unknown length."""
    with pytest.raises(ValueError, match="expected 1 entries .* got 8"):
        bound(modules.Add() @ (Flatten(2), Linear(8, 6) @ Flatten(1), Linear(1, 6) @ Flatten(1)))


ATOMS = [
    Linear(3, 6), Bias(6), modules.Unembed(3, 6), modules.Conv2D(3, 6), contrib.TwoTap(6, 2),
    contrib.LocallyConnected((4,), 3, 6), contrib.LocallyConnected((6, 4), 3, 6),
]  # fmt: skip


@pytest.mark.parametrize("atom", ATOMS, ids=repr)
def test_atoms_broadcast_no_axis(atom):
    params = atom.init(jax.random.key(0))
    jax.eval_shape(atom.apply, params, jnp.ones((6, 4, 6)))
    wrong = [(6, 4, 1), (6, 4, 5), (6, 4, 12)]
    if isinstance(atom, contrib.LocallyConnected):
        wrong += [(6, 1, 6), (6, 2, 6)]
    for shape in wrong:
        with pytest.raises(ValueError, match="takes"):
            jax.eval_shape(atom.apply, params, jnp.ones(shape))


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


HEADS = modules.SplitHeads(3)
KEEPERS = [
    modules.RMSDivide(), 0.9 * Identity() + 0.1 * ReLU(), Linear(9, 6, FRAMES) @ Abs(), Abs(),
    Identity(), -1.5 * Identity(), Identity() + 0.25 * Abs(), GroupSort(2), Linear(8, 6, FRAMES),
    contrib.SpaceToDepth(2), Flatten(2), Flatten(3), modules.RoPE(), HEADS, modules.MergeHeads(),
    modules.MergeHeads() @ HEADS, Bias(6),
]  # fmt: skip
NOT_KEPT = [Linear(4, 6, FRAMES), contrib.Shift(), AveragePool(2, 2)]


@pytest.mark.parametrize("net", KEEPERS + NOT_KEPT, ids=repr)
def test_outputs_stay_above_lower_bound(rng, net):
    """Inputs have the smallest declared size: a single nonzero entry per pixel, or random."""
    params = weights_of(net)
    apply = jax.jit(net.apply)
    kept = bound(net, params, input_norm=NormBound(1.0, 1.0, features=6)).outputs.lower > 0
    assert kept == (net in KEEPERS)
    for measure in (RMS(), LInf(), L2(1), L2(2), L2(3)):
        size = NormBound(1.0, 1.0, measure, features=6)
        outputs = bound(net, params, input_norm=size).outputs
        for kind in range(6):
            x = rng.choice([-1.0, 1.0], (4, 4, 1)) * np.eye(6)[rng.integers(6, size=(4, 4))]
            x = rng.standard_normal((4, 4, 6)) if kind % 2 else x
            axes = tuple(range(-measure.axes, 0)) if isinstance(measure, L2) else -1
            total = {L2: np.sum, RMS: np.mean, LInf: np.max}[type(measure)]
            x /= np.sqrt(total(x**2, axis=axes, keepdims=True))
            y = np.asarray(apply(params, x.astype(np.float32)), np.float64)
            assert smallest(outputs.norm, y) >= outputs.lower * (1 - 1e-5)
