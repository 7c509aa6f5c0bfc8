"""Bonds: forward maps by NumPy, and measured sensitivities and sharpness."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from manifoldmuon import modules
from manifoldmuon.bounds import NormBound, bound
from tests.modules import measure

X = measure.gaussian(0, 2, 4, 6)
Q, K, V = (measure.unit_tokens(seed, 2, 4, 6) for seed in (1, 2, 3))
IMAGE = measure.unit_tokens(6, 2, 4, 6, 3)

ONE = NormBound(1.0, 1.0)
HELD = [
    modules.Identity(),
    modules.Mul(-2.5),
    modules.Mul(0.0),
    modules.Abs(),
    modules.ReLU(),
    modules.GELU(modules.GELU.LIPSCHITZ),
    modules.MeanSubtract(),
    modules.RMSDivide(),
    modules.SplitHeads(4),
    modules.MergeHeads(),
    modules.AveragePool(2, 3),
    modules.Flatten(3),
    modules.RoPE(),
]


def test_declared_sensitivities_hold_at_norm_one():
    """`tests/bounds/test_rules.py` attacks these bounds."""
    for bond in HELD:
        assert bound(bond, input_norm=ONE).lipschitz_inputs == bond.sensitivity, bond
    assert bound(modules.Add(), input_norm=(ONE, ONE)).lipschitz_inputs == modules.Add().sensitivity
    for attention in (modules.FunctionalAttention(), modules.FunctionalAttention(False)):
        assert bound(attention, input_norm=(ONE,) * 3).lipschitz_inputs == attention.sensitivity


def like(x, seed):
    return jax.tree.map(lambda a: measure.gaussian(seed, *a.shape), x)


# Sharpness: bond, a point, norms of input and output.
SHARPNESS = {
    "RMSDivide": (modules.RMSDivide(), measure.unit_tokens(0, 6), measure.tokens, measure.tokens),
    "GELU": (modules.GELU(), 0.3 * measure.gaussian(0, 6), measure.largest, measure.largest),
    "FunctionalAttention": (
        modules.FunctionalAttention(),
        (Q[0], K[0], V[0]),
        measure.total(*[measure.tokens] * 3),
        measure.tokens,
    ),
}


@pytest.mark.parametrize("name", SHARPNESS)
def test_declared_sharpness_is_not_exceeded(name):
    bond, x, size_in, size_out = SHARPNESS[name]
    forward, worst = bond.forward, 0.0
    for seed in range(60):
        a, b = like(x, 2 * seed), like(x, 2 * seed + 1)
        if seed % 2:
            a, b = (jax.tree.map(jnp.sign, t) for t in (a, b))
        if isinstance(x, tuple) and seed % 3:  # each direction moves a single input
            i, j = seed % len(x), (seed + 1) % len(x)
            a = tuple(t if k == i else jnp.zeros_like(t) for k, t in enumerate(a))
            b = tuple(t if k == j else jnp.zeros_like(t) for k, t in enumerate(b))
        worst = max(worst, size_out(measure.push_twice(forward, x, a, b)) / size_in(a) / size_in(b))
    assert 0.1 * bond.gamma < worst <= bond.gamma * (1 + 1e-5)


def test_rms_division_sharpness_is_attained():
    """The maximum is at an angle to the point with squared sine 2/3."""
    x = jnp.array([1.0, 1.0])
    u = math.sqrt(1 / 3) * x + math.sqrt(2 / 3) * jnp.array([1.0, -1.0])
    assert measure.tokens(
        measure.push_twice(modules.RMSDivide().forward, x, u, u)
    ) == pytest.approx(2 / math.sqrt(3), rel=1e-5)


# Published and measured constants ----------------------------------------------------------------


def test_relu_published_sensitivity_needs_balanced_signs():
    balanced, positive = measure.gaussian(0, 4096), jnp.abs(measure.gaussian(0, 4096))
    dx = measure.gaussian(1, 4096)
    forward = modules.ReLU().forward
    gain = lambda x: float(measure.rms(measure.push(forward, (x,), (dx,))) / measure.rms(dx))  # noqa: E731
    assert gain(balanced) == pytest.approx(
        modules.ReLU(modules.ReLU.BALANCED).sensitivity, rel=0.03
    )
    assert gain(positive) == modules.ReLU().sensitivity == 1


def test_gelu_sensitivity_on_gaussian_is_0_675():
    """The published 1/sqrt(2) is a substitute for the exact figure; the worst case is 1.1289."""
    t, weight = np.polynomial.hermite_e.hermegauss(80)
    slope = scipy.special.ndtr(t) + t * np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    exact = math.sqrt(np.sum(weight * slope**2) / np.sum(weight))
    assert exact == pytest.approx(0.675, abs=5e-4)
    dx = measure.gaussian(1, 4096)
    found = measure.rms(
        measure.push(modules.GELU().forward, (measure.gaussian(0, 4096),), (dx,))
    ) / measure.rms(dx)
    assert found == pytest.approx(exact, rel=0.03)
    grid = jnp.linspace(-6, 6, 4001)
    steepest = measure.largest(measure.push(modules.GELU().forward, (grid,), (jnp.ones(4001),)))
    assert steepest == pytest.approx(modules.GELU.LIPSCHITZ, rel=1e-6)
    assert pytest.approx(1.1289, abs=5e-5) == modules.GELU.LIPSCHITZ


# Forward maps ------------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


F = np.asarray(X, np.float64)
FORWARD = {
    "Abs": (modules.Abs(), X, np.abs(F)),
    "ReLU": (modules.ReLU(), X, np.where(F > 0, F, 0)),
    "GELU": (modules.GELU(), X, F * scipy.special.ndtr(F)),
    "Mul": (modules.Mul(-2.0), X, -2 * F),
    "Add": (modules.Add(), (X, X, X), 3 * F),
    "MeanSubtract": (modules.MeanSubtract(), X, F - F.mean(-1, keepdims=True)),
    "RMSDivide": (modules.RMSDivide(), X, F / np.sqrt((F**2).mean(-1, keepdims=True))),
    "RMSDivide of tiny": (
        modules.RMSDivide(),
        1e-30 * X,
        F / np.sqrt((F**2).mean(-1, keepdims=True)),
    ),
    "RMSDivide of huge": (
        modules.RMSDivide(),
        1e30 * X,
        F / np.sqrt((F**2).mean(-1, keepdims=True)),
    ),
    "RMSDivide of zero": (modules.RMSDivide(), jnp.zeros((2, 3)), np.zeros((2, 3))),
    "LayerNorm": (
        modules.RMSDivide() @ modules.MeanSubtract(),
        X,
        (F - F.mean(-1, keepdims=True)) / F.std(-1, keepdims=True),
    ),
    "Flatten": (modules.Flatten(2), X, F.reshape(2, 24)),
    "Positions": (modules.Positions(), jnp.array([[7, 7, 7], [1, 2, 3]]), [[0, 1, 2], [0, 1, 2]]),
    "Positions of bytes": (modules.Positions(), jnp.zeros(300, jnp.uint8), np.arange(300)),
    "SplitHeads": (
        modules.SplitHeads(3),
        X,
        np.stack([F[..., 2 * h : 2 * h + 2] for h in range(3)], 1),
    ),
    "MergeHeads": (modules.MergeHeads() @ modules.SplitHeads(3), X, F),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_matches_numpy(name):
    bond, x, expected = FORWARD[name]
    np.testing.assert_allclose(
        bond.apply(bond.init(jax.random.key(0)), x), expected, rtol=1e-5, atol=1e-6
    )


def test_average_pool_is_mean_of_blocks():
    y = modules.AveragePool(2, 3).forward(IMAGE)
    for i in range(2):
        for j in range(3):
            block = np.asarray(IMAGE)[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            np.testing.assert_allclose(y[:, i, j], block.mean((1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_matches_loop(causal):
    q, k, v = (np.asarray(t, np.float64) for t in (Q, K, V))
    expected = np.zeros_like(v)
    for b in range(2):
        for i in range(4):
            seen = range(i + 1) if causal else range(4)
            p = softmax(np.array([q[b, i] @ k[b, j] / 6 for j in seen]))
            expected[b, i] = sum(p[n] * v[b, j] for n, j in enumerate(seen))
    found = modules.FunctionalAttention(causal).forward((Q, K, V))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rope_rotates_complex_pairs():
    """Pairs are complex numbers times exp(i t / base**(j / half)); scores depend on distance."""
    x = np.asarray(X, np.float64)
    z = x[..., :3] + 1j * x[..., 3:]
    turned = z * np.exp(1j * np.arange(4)[:, None] / 100.0 ** (np.arange(3) / 3))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(modules.RoPE(100.0).forward(X), expected, rtol=1e-5, atol=1e-6)
    same = jnp.broadcast_to(X[:1, :1], (1, 4, 6))
    other = jnp.broadcast_to(X[1:, :1], (1, 4, 6))
    scores = (modules.RoPE().forward(same) @ modules.RoPE().forward(other).mT)[0]
    for distance in range(-3, 4):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
