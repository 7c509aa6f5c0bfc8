"""Sharpness and smoothness under attack."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks._bounds import (
    Attack,
    build,
    inside,
    norm,
    to_jax,
    tokens,
    toward,
)
from manifoldmuon.bounds import (
    RMS,
    LInf,
    NormBound,
    bound,
)
from manifoldmuon.contrib import (
    cross_entropy_smoothness,
    square_error_smoothness,
)
from manifoldmuon.modules import (
    GELU,
    FunctionalAttention,
    Identity,
    Linear,
    RMSDivide,
    SplitHeads,
    gpt,
    mlp,
)

NEAR = 1 + 1e-3
SMOOTH = Linear(4, 9) @ GELU() @ Linear(9, 6)


@pytest.fixture(scope="module")
def smooth():
    """A smooth network, its bounds over all weights on the manifolds, and the attack on it."""
    net = SMOOTH.constrained()
    found = bound(net, input_norm=2.0)
    return net, found, Attack(net, found.inputs, found.outputs, jnp.zeros((2, 6)))


def test_the_sharpness_of_a_smooth_network_is_not_exceeded(smooth):
    _, found, attack = smooth
    alpha, beta, gamma = found.sharpness
    assert 0.1 * alpha < attack.climb_twice(4, first="w", second="w") <= alpha * NEAR
    assert 0.1 * beta < attack.climb_twice(4, first="w", second="x") <= beta * NEAR
    assert 0.1 * gamma < attack.climb_twice(4, first="x", second="x") <= gamma * NEAR


def test_the_declared_sharpness_is_exceeded(smooth):
    """GELU's is that of the largest entry: a spike among d entries has sqrt(d) times as much."""
    net, _, attack = smooth
    assert attack.climb_twice(4, first="x", second="x") > 1.5 * net.sharpness.gamma
    gelu, d = bound(GELU(), input_norm=NormBound(2.0, features=64)), 64
    assert gelu.sharpness.gamma == pytest.approx(8 * GELU.gamma)
    spike = jnp.zeros(d).at[0].set(math.sqrt(d))
    bend = jax.jvp(jax.grad(lambda t: GELU().forward(t * spike)[0]), (0.0,), (1.0,))[1]
    assert float(bend) / math.sqrt(d) == pytest.approx(gelu.sharpness.gamma, rel=1e-5)


def test_the_sharpness_of_a_gpt_is_not_exceeded():
    net = gpt(5, 4, 2, 1).constrained()
    found = bound(net)
    attack = Attack(net, found.inputs, found.outputs, tokens(0, net, 1, 3))
    worst = attack.climb_twice(2, first="w", second="w")
    assert 0.01 * found.sharpness.alpha < worst <= found.sharpness.alpha * NEAR


HEADS = NormBound(1.5, measure=RMS(2), features=3)
BENDS = {
    "RMSDivide": (RMSDivide(), NormBound(0.5, 0.5), (3, 4), 0.5),
    "attention": (FunctionalAttention(False), (NormBound(1.5),) * 3, ((3, 4),) * 3, 0.2),
    "attention of heads": (FunctionalAttention(False), (HEADS,) * 3, ((2, 3, 3),) * 3, 0.05),
}


@pytest.mark.parametrize("name", BENDS)
def test_the_sharpness_of_bonds_is_not_exceeded(name):
    """Random points and directions, the directions then improved in turn."""
    bond, sizes, shapes, share = BENDS[name]
    found = bound(bond, input_norm=sizes)

    def bend(x, a, b):
        def once(x):
            return jax.jvp(bond.forward, (x,), (a,))[1]

        return norm(found.outputs, jax.jvp(once, (x,), (b,))[1])

    climb = jax.jit(jax.value_and_grad(bend, argnums=(1, 2)))
    worst = 0.0
    for kind in range(15):
        x = inside(sizes, build(sizes, shapes, kind, kind % 5))
        a, b = (toward(sizes, build(sizes, shapes, kind + s, (kind + s) % 5)) for s in (1, 3))
        for _ in range(8):
            value, (ga, gb) = climb(*map(to_jax, (x, a, b)))
            worst = max(worst, float(value))
            a, b = toward(sizes, ga), toward(sizes, gb)
    assert share * found.sharpness.gamma <= worst <= found.sharpness.gamma * NEAR


def errors(loss, f, target):
    if loss is square_error_smoothness:
        return jnp.mean((f - target) ** 2, axis=-1) / 2
    return optax.softmax_cross_entropy(f, target)


def ask(loss, *given):
    """The smoothness; targets have the RMS norm 2."""
    target = (2.0,) if loss is square_error_smoothness else ()
    return loss(given[0], *target, *given[1:])


LOSSES = {
    "square error": (square_error_smoothness, RMS()),
    "cross-entropy": (cross_entropy_smoothness, RMS()),
    "cross-entropy of scores": (cross_entropy_smoothness, LInf()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sigma_and_tau(name):
    """Slopes and curvatures of 2000 random outputs along the steepest and random movements."""
    loss, measure = LOSSES[name]
    size = NormBound(6.0, measure=measure, features=4)
    outputs = bound(Identity(), input_norm=size)
    most = ask(loss, outputs)
    rng = np.random.default_rng(0)
    f = rng.standard_normal((2000, 4)) * rng.choice([0.1, 1, 3], (2000, 1))
    f[0] = [10.0, 10, -20, -20]  # two classes share the probability
    f[1] = [30.0, -30, -30, -30]  # sure, and wrong
    f *= np.minimum(1, 6.0 / np.sqrt(np.mean(f**2, -1, keepdims=True)))
    f = to_jax(f)
    label = jax.nn.one_hot(jnp.asarray(rng.integers(4, size=2000)).at[1].set(2), 4)
    target = 2 * label if loss is square_error_smoothness else label
    value = errors(loss, f, target)
    grads = jax.grad(lambda f: errors(loss, f, target).sum())(f)
    slopes = np.sum(toward(size, grads) * np.asarray(grads), axis=-1)
    assert 0.5 * most.sigma < slopes.max() <= most.sigma * NEAR
    for v, slope in zip(np.asarray(value)[:200], slopes[:200], strict=True):
        assert slope <= ask(loss, outputs, float(v)).sigma * NEAR + 1e-5

    def curvature(d):
        slope = lambda f: jax.jvp(lambda f: errors(loss, f, target), (f,), (d,))[1]  # noqa: E731
        return jax.jvp(slope, (f,), (d,))[1]

    twins = np.tile([1.0, -1, 0, 0], (2000, 1))
    ways = [toward(size, d) for d in (rng.standard_normal((2000, 4)), np.asarray(grads), twins)]
    worst = max(float(curvature(to_jax(d)).max()) for d in ways)
    assert 0.95 * most.tau < worst <= most.tau * NEAR


@pytest.mark.parametrize("loss", [square_error_smoothness, cross_entropy_smoothness])
def test_the_loss_is_as_smooth_as_its_bound(smooth, loss):
    """Second derivatives along steps of modular norm 1, found by ascent at several weights."""
    net, found, attack = smooth
    target = jax.nn.one_hot(jnp.array([1, 3]), 4)
    target = 2 * target if loss is square_error_smoothness else target

    def bend(w, x, d):
        def mean(w):
            return errors(loss, net.apply(w, x), target).mean()

        return jax.jvp(lambda w: jax.jvp(mean, (w,), (d,))[1], (w,), (d,))[1], mean(w)

    climb = jax.jit(jax.value_and_grad(bend, argnums=2, has_aux=True))
    anywhere, worst = ask(loss, found).bound, 0.0
    for seed in range(4):
        w, x, d, _ = attack.random(seed)
        for _ in range(8):
            (value, error), grads = climb(*map(to_jax, (w, x, d)))
            here = ask(loss, bound(net, w, input_norm=2.0), float(error)).bound
            assert float(value) <= here * NEAR <= anywhere * NEAR**2
            worst = max(worst, float(value))
            d = attack.step(grads)
    assert worst > 0.02 * anywhere


def test_proposition_5_for_a_well_normed_network():
    """Two linear layers: alpha 1/2, slope 1; sigma alpha + tau."""
    net = (Linear(4, 4) @ Linear(4, 4)).constrained()
    found = square_error_smoothness(bound(net), value=0.5)
    assert found.alpha == net.sharpness.alpha == 0.5
    assert found.lipschitz_weights == 1
    assert found.bound == pytest.approx(1.0 * 0.5 + 1.0)


def test_kinks_are_refused():
    """ReLU is declared with sharpness 0; the bounds say that it has none."""
    found = square_error_smoothness(bound(mlp(3, 4, 4, 2)))
    assert found.bound == math.inf
    assert found.reasons == ("ReLU has a kink, and no second derivative there",)
    last = square_error_smoothness(bound(Linear(3, 4) @ mlp(4, 4, 4, 2).tare(absolute=0.0)))
    assert math.isfinite(last.bound)  # only the last layer moves, behind all kinks
    assert last.reasons == ()


def test_losses_refuse_wrong_arguments():
    heads = bound(SplitHeads(2) @ Linear(4, 4))
    assert square_error_smoothness(heads).tau == pytest.approx(2)
    with pytest.raises(ValueError, match="one output array"):
        square_error_smoothness(bound((Linear(2, 2), Linear(2, 2)) @ Linear(2, 2)))
    with pytest.raises(ValueError, match="number of classes is not known"):
        cross_entropy_smoothness(bound(GELU()))
    with pytest.raises(ValueError, match="value"):
        square_error_smoothness(bound(Linear(2, 2)), value=-1.0)
