"""Bound rules of all bonds under attack, and wrong rules that the attack must catch."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon import bounds, modules
from manifoldmuon.bounds import L2, RMS, LInf, LipschitzBounds, NormBound, OneHot, bound
from manifoldmuon.bounds._norm_bounds import factor_between
from manifoldmuon.contrib import LocallyConnected, Shift, SpaceToDepth, TwoTap
from manifoldmuon.manifolds import Euclidean
from manifoldmuon.modules import Abs, Add, Bias, Embed, FunctionalAttention, Identity, Linear, ReLU
from manifoldmuon.norms import Frobenius, MaxAbs
from tests.bounds.slopes import build, check_outputs, input_slope, random_weights
from tests.oracles.bounds import inside, norm, weights_of

UNIT, BIG = NormBound(1.0, features=6), NormBound(3.0, features=6)
HEADS = NormBound(2.0, norm=RMS(2), features=3)
SCORES = NormBound(2.0, norm=LInf(), features=4)
T, S, P, H = (2, 4, 6), (2, 4, 4), (2, 4, 6, 3), (2, 4, 3)
IMAGE = (4, 4, 6)

# bond, sizes, shapes, and the least fraction of the bound that the attack attains.
RULES = {
    "Identity": (Identity(), UNIT, T, 0.999),
    "Mul": (modules.Mul(-2.5), UNIT, T, 0.999),
    "Mul of heads": (modules.Mul(3.0), HEADS, H, 0.999),
    "Add": (Add(), (UNIT, BIG), (T, T), 0.999),
    "Add of two norms": (Add(), (SCORES, NormBound(1.0, features=4)), (S, S), 0.999),
    "Abs": (Abs(), UNIT, T, 0.999),
    "ReLU": (ReLU(), UNIT, T, 0.999),
    "ReLU of balanced signs": (ReLU(ReLU.BALANCED), UNIT, T, 0.999),
    "scaled ReLU": (math.sqrt(2) * ReLU(), UNIT, T, 0.999),
    "GELU": (modules.GELU(), BIG, T, 0.99),
    "GELU of heads": (modules.GELU(), HEADS, H, 0.99),
    "MeanSubtract": (modules.MeanSubtract(), UNIT, T, 0.999),
    "MeanSubtract of scores": (modules.MeanSubtract(), SCORES, S, 0.7),
    "RMSDivide": (modules.RMSDivide(), NormBound(1.0, 1.0), T, 0.999),
    "RMSDivide of large": (modules.RMSDivide(), NormBound(3.0, 3.0), T, 0.999),
    "MeanSubtract of RMSDivide": (
        modules.MeanSubtract() @ modules.RMSDivide(), NormBound(2.0, 2.0), T, 0.99,
    ),
    "SplitHeads": (modules.SplitHeads(3), UNIT, T, 0.999),
    "MergeHeads": (modules.MergeHeads(), NormBound(1.0), (2, 3, 4, 2), 0.999),
    "MergeHeads @ SplitHeads": (modules.MergeHeads() @ modules.SplitHeads(3), UNIT, T, 0.999),
    "AveragePool": (modules.AveragePool(2, 3), NormBound(1.0), P, 0.99),
    "Flatten": (modules.Flatten(3), NormBound(1.0), P, 0.99),
    "RoPE": (modules.RoPE(), UNIT, T, 0.999),
    # Entries that move between pixels can increase the largest RMS norm of a pixel.
    "GroupSort": (modules.GroupSort(2), UNIT, T, 0.4),
    "SpaceToDepth": (SpaceToDepth(2), UNIT, IMAGE, 0.4),
    "Shift": (Shift(), UNIT, IMAGE, 0.4),
    "Shift of entries": (Shift(), NormBound(1.0, norm=LInf()), IMAGE, 0.4),
    "LocallyConnected": (LocallyConnected((5,), 4, 6), UNIT, (5, 6), 0.4),
    "TwoTap": (TwoTap(6, 3), UNIT, (5, 6), 0.4),
    "TwoTap of rows": (TwoTap(6, 3, axis=-3), NormBound(1.0, norm=L2(2), features=6), IMAGE, 0.4),
    "Bias": (Bias(6), UNIT, (5, 6), 0.4),
    "attention": (FunctionalAttention(), (UNIT, UNIT, UNIT), (T, T, T), 0.9),
    "attention of large": (FunctionalAttention(False), (BIG, UNIT, BIG), (T, T, T), 0.9),
    "attention of heads": (FunctionalAttention(False), (HEADS,) * 3, (H, H, H), 0.75),
    "causal attention of heads": (FunctionalAttention(), (HEADS,) * 3, (H, H, H), 0.6),
    # Norms that take the maximum over tokens do not count broadcast copies twice.
    "broadcast queries": (FunctionalAttention(), (UNIT,) * 3, ((1, 6), (4, 6), (4, 6)), 0.1),
    "broadcast values": (FunctionalAttention(False), (UNIT,) * 3, ((1, 6), T, (4, 6)), 0.1),
    "broadcast keys": (FunctionalAttention(False), (HEADS,) * 3, (H, (3, *H), H), 0.1),
    "broadcast heads": (
        FunctionalAttention(False), (HEADS, *2 * (NormBound(1.0, features=3),)),
        (H, (4, 3), (4, 3)), 0.1,
    ),
}  # fmt: skip


def attacked(name):
    """Return the largest slope of the attack, and the bound."""
    bond, sizes, shapes, _ = RULES[name]
    params = random_weights(bond)
    found = bound(bond, params, input_norm=sizes)
    worst = input_slope(lambda x: bond.apply(params, x), sizes, found.outputs, shapes)
    return worst, found.lipschitz_inputs


@pytest.mark.slow_except(
    "ReLU", "attention", "RMSDivide", "MeanSubtract", "Mul", "GELU", "Shift", "TwoTap of rows"
)
@pytest.mark.parametrize("name", RULES)
def test_attacks_stay_within_rule_bounds(name):
    worst, most = attacked(name)
    assert RULES[name][3] * most <= worst <= most * (1 + 1e-4)


def declared(bond, weights, x):
    return LipschitzBounds.of(x.within(bond.sensitivity), bond.sensitivity)


ATTENTION = bounds.propagate.dispatch(FunctionalAttention)


def without_heads(bond, weights, x):
    """Take the largest head for the mean over the heads."""
    right = ATTENTION(bond, weights, tuple(NormBound(part.upper) for part in x))
    return dataclasses.replace(right, outputs=x[2])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("ReLU of balanced signs", declared),
        ("GELU", declared),
        ("MeanSubtract of scores", declared),
        ("attention of heads", without_heads),
        ("attention of large", lambda *args: LipschitzBounds.of(NormBound(3.0), [1.0, 1.0, 1.0])),
    ],
)
def test_attack_catches_wrong_rules(name, wrong):
    """Wrong rules: declared sensitivities, a missing factor for heads, norms assumed to be 1."""
    kind = type(RULES[name][0])
    right = bounds.propagate.dispatch(kind)
    bounds.propagate.register(kind, wrong)
    try:
        worst, most = attacked(name)
    finally:
        bounds.propagate.register(kind, right)
    assert worst > 1.05 * most


def test_output_norms_stay_within_upper_bounds():
    check_outputs({
        name: (bond, random_weights(bond), sizes, shapes)
        for name, (bond, sizes, shapes, _) in RULES.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a in (RMS(), LInf(), RMS(2)) for b in (RMS(), LInf())]
    + [(a, L2()) for a in (RMS(), LInf(), L2(2))]
    + [(a, b) for a in (L2(), L2(2)) for b in (RMS(), LInf())],
)
def test_norm_conversion_factors_are_bounds(source, target):
    """Try random, constant and spiked vectors; the best attains at least half of the factor."""
    size = NormBound(1.0, norm=source, features=3 if source == RMS(2) else 4)
    shape = (2, 4, 3) if source == RMS(2) else (5, 4)
    ratios = []
    for kind in range(5):
        x = inside(size, build(size, shape, 0, kind))
        ratios.append(float(norm(NormBound(1.0, norm=target), x)))
    assert max(ratios) <= factor_between(size, target) * (1 + 1e-6)
    if source != L2(2):
        assert max(ratios) >= 0.5 * factor_between(size, target)


@dataclasses.dataclass(frozen=True)
class Tanh(modules.Bond):
    """A bond without a registered rule."""

    sensitivity: ClassVar[float] = 1.0

    def forward(self, x):
        return jnp.tanh(x)


def test_bond_without_rule_error_names_register():
    net = Linear(3, 4) @ Tanh() @ Linear(4, 4)
    with pytest.raises(TypeError, match="registered for Tanh.*bounds.propagate.register"):
        bound(net)

    @bounds.propagate.register
    def bound_tanh(bond: Tanh, weights, x):
        read = LipschitzBounds.convert_norm(x, RMS())
        return read.then_of(read.outputs.within(), 1.0)

    assert bound(net).lipschitz_inputs == pytest.approx(1)


def test_plain_input_norm_is_rms_except_for_tokens():
    @dataclasses.dataclass(frozen=True)
    class Square(modules.Bond):
        """Half the square of every score: its slope is the largest score."""

        sensitivity: ClassVar[float] = 1.0

        def forward(self, x):
            return x**2 / 2

    @bounds.propagate.register
    def bound_square(bond: Square, weights, x):
        read = LipschitzBounds.convert_norm(x, LInf())
        top = read.outputs.upper
        return read.then_of(read.outputs.within(top / 2), top)

    net = Linear(3, 4).constrained() @ Square()
    params = weights_of(net)

    def slope(found):
        return input_slope(lambda x: net.apply(params, x), found.inputs, found.outputs, (2, 4))

    # An RMS norm of 2 allows a single score of 4, where the slope is 4. Measuring a movement by its
    # largest score costs another factor of 2.
    with pytest.raises(ValueError, match="needs the length of the last axis"):
        bound(net, input_norm=2.0)
    spread = bound(net, input_norm=NormBound(2.0, features=4))
    assert spread.lipschitz_inputs == pytest.approx(8)
    assert 0.4 * spread.lipschitz_inputs < slope(spread) <= spread.lipschitz_inputs
    found = bound(net, input_norm=NormBound(2.0, norm=LInf()))
    assert found.lipschitz_inputs == pytest.approx(2)
    assert found.output_norm == pytest.approx(2)
    assert 0.8 * found.lipschitz_inputs < slope(found) <= found.lipschitz_inputs * (1 + 1e-4)
    embed = Embed(4, 7)
    for first in (embed, (embed, embed @ modules.Positions()), Identity() @ embed):
        assert bound(first @ Identity()).inputs.norm == OneHot()
    assert bound((Identity(), Abs()) @ Identity()).inputs.norm == RMS()


def test_manifold_without_rule_error_names_register():
    with pytest.raises(TypeError, match="registered for object.*bounds.matrix_bounds.register"):
        bounds.matrix_bounds(object(), (3, 4))


@pytest.mark.parametrize("norm", [MaxAbs(), Frobenius(ndim=0, scale=0.5)])
def test_entry_bound_bounds_matrix(norm):
    found = bounds.matrix_bounds(Euclidean(norm), (3, 5))
    rng = np.random.default_rng(0)
    for weight in (np.ones((3, 5)), *rng.choice([-1.0, 1.0], size=(20, 3, 5))):
        weight = weight / np.max(norm.norm(jnp.float32(weight)))
        assert np.linalg.norm(weight, 2) <= found.spectral * (1 + 1e-6)
        assert np.linalg.norm(weight, axis=1).max() <= found.row * (1 + 1e-6)
    weight = np.ones((3, 5)) / np.max(norm.norm(jnp.ones((3, 5))))
    assert np.linalg.norm(weight, 2) == pytest.approx(found.spectral)
    assert np.linalg.norm(weight[0]) == pytest.approx(found.row)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: bound(FunctionalAttention()), "expected a tuple of 3 arrays"),
        (lambda: bound(Abs() @ modules.Positions()), "takes arrays of numbers"),
        (lambda: bound(Add()), "expected a tuple of terms"),
        (lambda: bound(Abs(), input_norm=-1.0), "input_norm"),
        (lambda: bound(Abs(), input_norm=math.nan), "input_norm"),
        (lambda: bound(Linear(3, 3), radius=0.1), ".radius. needs params"),
        (lambda: bound(Linear(3, 3), np.eye(3), drift=0.1), ".drift. takes no params"),
        (lambda: bound(Linear(3, 3), np.full((3, 3), np.nan)), "real and finite"),
        (lambda: bound(Linear(3, 4), np.full((3, 4), 5j)), r"finite; got complex128 \(3, 4\)"),
        (lambda: bound(Linear(3, 4), np.full((3, 4), "5")), "real and finite; got <U1"),
        (lambda: bound(Linear(3, 4), np.ones((7, 9))), r"shape \(3, 4\); got \(7, 9\)\nat Linear"),
        (lambda: bound(Linear(3, 4), np.ones((4, 3))), r"shape \(3, 4\); got \(4, 3\)"),
        (lambda: bound(Linear(3, 4), np.ones((2, 3, 4))), r"shape \(3, 4\); got \(2, 3, 4\)"),
        (lambda: bound(Bias(3), np.ones(5)), r"shape \(3,\); got \(5,\)\nat Bias"),
        (lambda: bound(Embed(4, 8), np.ones((2, 2))), r"shape \(8, 4\); got \(2, 2\)"),
        (lambda: bound(Linear(4, 4) ** 2, np.ones((3, 4, 4))), r"\(2, 4, 4\); got \(3, 4, 4\)"),
        (lambda: bound(Linear(4, 4) ** 3, np.ones((2, 4, 4))), r"got \(2, 4, 4\)\nat Stack of 3"),
        (lambda: bound(Linear(4, 4) ** 3, np.ones(())), r"shape \(3,\); got \(\)"),
        (lambda: bound(Linear(3, 3), (np.eye(3),)), "structure that init returns"),
        (lambda: NormBound(1.0, 2.0), "0 <= lower <= upper"),
        (lambda: bound(modules.SplitHeads(5) @ Linear(6, 6)), r"5 does not .*\nat SplitHeads"),
        (lambda: bound(modules.GroupSort(4) @ Linear(6, 6)), "4 does not divide the 6 entries"),
        (lambda: bound((0.5 * modules.GroupSort(2)) @ Linear(3, 3)), "at GroupSort"),
        (lambda: bound(modules.RoPE() @ Linear(5, 6)), "2 does not divide the 5 entries"),
        (lambda: bound(Linear(3, 5) @ Linear(6, 6)), r"expected 5 entries .* got 6\nat Linear\(3"),
        (lambda: bound(modules.Conv2D(3, 5) @ modules.Conv2D(6, 6)), "expected 5 entries .* got 6"),
        (lambda: bound(Bias(5) @ Linear(6, 6)), "expected 5 entries .* got 6"),
        (lambda: bound(TwoTap(4, 2) @ Linear(6, 6)), "expected 4 entries .* got 6"),
        (lambda: bound(modules.Unembed(9, 5) @ Linear(6, 6)), "expected 5 entries .* got 6"),
        (lambda: bound(LocallyConnected((2,), 3, 5) @ Linear(6, 6)), "expected 5 entries"),
        (lambda: bound(Linear(3, 6) + Linear(4, 6)), r"expected 4 entries .* got 3\nat Add"),
        (lambda: bound(FunctionalAttention() @ (Linear(3, 6), *2 * (Linear(4, 6),))), "expected 4"),
        (lambda: bound(Linear(3, 5), input_norm=NormBound(1.0, features=6)), "expected 5 entries"),
    ],
)
def test_error_messages(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_tokens_have_norm_one_despite_input_norm():
    declared = NormBound(0.5, norm=OneHot())
    assert bound(Embed(4, 7), input_norm=declared).lipschitz_weights == 1


def test_attack_reports_nan_slope():
    size = NormBound(1.0, features=4)
    assert math.isnan(input_slope(jnp.sqrt, size, size, (2, 4)))  # the root of negative numbers
