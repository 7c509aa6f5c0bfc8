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
LAYER_NORM = modules.RMSDivide() @ modules.MeanSubtract()
HELD = [modules.Identity(), modules.Mul(-2.5), modules.Mul(0.0), modules.Abs(), modules.ReLU(),
        modules.GELU(modules.GELU.LIPSCHITZ), modules.MeanSubtract(), modules.RMSDivide(),
        modules.SplitHeads(4), modules.MergeHeads(), modules.AveragePool(2, 3), modules.Flatten(3),
        modules.RoPE()]  # fmt: skip
ATTENTION = modules.FunctionalAttention()


def test_declared_sensitivities_hold_at_norm_one():
    """`tests/bounds/test_rules.py` attacks these bounds."""
    held = [(bond, ONE) for bond in HELD] + [(modules.Add(), (ONE, ONE))]
    held += [(ATTENTION, (ONE,) * 3), (modules.FunctionalAttention(False), (ONE,) * 3)]
    for bond, norm in held:
        assert bound(bond, input_norm=norm).lipschitz_inputs == bond.sensitivity, bond


def length(x):
    """Return the norm of an array, or the sum of the norms of a tuple."""
    return sum(map(measure.tokens, x)) if isinstance(x, tuple) else measure.tokens(x)


# Sharpness: bond, a point, and the norm.
SHARPNESS = {
    "RMSDivide": (modules.RMSDivide(), measure.unit_tokens(0, 6), length),
    "GELU": (modules.GELU(), 0.3 * measure.gaussian(0, 6), measure.largest),
    "FunctionalAttention": (ATTENTION, (Q[0], K[0], V[0]), length),
}


@pytest.mark.parametrize("name", SHARPNESS)
def test_declared_sharpness_is_not_exceeded(name):
    (bond, x, size), worst = SHARPNESS[name], 0.0
    for seed in range(60):
        pair = [
            jax.tree.map(lambda t, s=s: measure.gaussian(s, *t.shape), x)
            for s in (2 * seed, 2 * seed + 1)
        ]
        if seed % 2:
            pair = jax.tree.map(jnp.sign, pair)
        if isinstance(x, tuple) and seed % 3:  # each direction moves a single input
            pair = [
                tuple(t * (k == (seed + i) % len(x)) for k, t in enumerate(way))
                for i, way in enumerate(pair)
            ]
        moved = measure.push_twice(bond.forward, x, *pair)
        worst = max(worst, size(moved) / size(pair[0]) / size(pair[1]))
    assert 0.1 * bond.gamma < worst <= bond.gamma * (1 + 1e-5)


def test_rms_division_sharpness_is_attained():
    """The maximum is at an angle to the point with squared sine 2/3."""
    x = jnp.array([1.0, 1.0])
    u = math.sqrt(1 / 3) * x + math.sqrt(2 / 3) * jnp.array([1.0, -1.0])
    found = measure.push_twice(modules.RMSDivide().forward, x, u, u)
    assert measure.tokens(found) == pytest.approx(2 / math.sqrt(3), rel=1e-5)


# Published and measured constants ----------------------------------------------------------------


def gain(bond, x):
    """Return the gain in RMS norm along a random direction."""
    dx = measure.gaussian(1, *x.shape)
    return float(measure.rms(measure.push(bond.forward, (x,), (dx,))) / measure.rms(dx))


def test_relu_published_sensitivity_needs_balanced_signs():
    relu, balanced, x = modules.ReLU(), modules.ReLU.BALANCED, measure.gaussian(0, 4096)
    assert gain(relu, x) == pytest.approx(modules.ReLU(balanced).sensitivity, rel=0.03)
    assert gain(relu, jnp.abs(x)) == relu.sensitivity == 1


def test_gelu_sensitivity_on_gaussian_is_0_675():
    """The published 1/sqrt(2) is a substitute for the exact figure; the worst case is 1.1289."""
    t, weight = np.polynomial.hermite_e.hermegauss(80)
    slope = scipy.special.ndtr(t) + t * np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    exact = math.sqrt(np.sum(weight * slope**2) / np.sum(weight))
    assert exact == pytest.approx(0.675, abs=5e-4)
    assert gain(modules.GELU(), measure.gaussian(0, 4096)) == pytest.approx(exact, rel=0.03)
    grid = jnp.linspace(-6, 6, 4001)
    steepest = measure.largest(measure.push(modules.GELU().forward, (grid,), (jnp.ones(4001),)))
    assert steepest == pytest.approx(modules.GELU.LIPSCHITZ, rel=1e-6)
    assert pytest.approx(1.1289, abs=5e-5) == modules.GELU.LIPSCHITZ


# Forward maps ------------------------------------------------------------------------------------


F = np.asarray(X, np.float64)
DIVIDED, CENTERED = F / np.sqrt((F**2).mean(-1, keepdims=True)), F - F.mean(-1, keepdims=True)
HEADS = np.stack([F[..., 2 * h : 2 * h + 2] for h in range(3)], 1)
FORWARD = {
    "Abs": (modules.Abs(), X, np.abs(F)),
    "ReLU": (modules.ReLU(), X, np.where(F > 0, F, 0)),
    "GELU": (modules.GELU(), X, F * scipy.special.ndtr(F)),
    "Mul": (modules.Mul(-2.0), X, -2 * F),
    "Add": (modules.Add(), (X, X, X), 3 * F),
    "MeanSubtract": (modules.MeanSubtract(), X, CENTERED),
    "RMSDivide": (modules.RMSDivide(), X, DIVIDED),
    "RMSDivide of tiny": (modules.RMSDivide(), 1e-30 * X, DIVIDED),
    "RMSDivide of huge": (modules.RMSDivide(), 1e30 * X, DIVIDED),
    "RMSDivide of zero": (modules.RMSDivide(), jnp.zeros((2, 3)), np.zeros((2, 3))),
    "LayerNorm": (LAYER_NORM, X, CENTERED / F.std(-1, keepdims=True)),
    "Flatten": (modules.Flatten(2), X, F.reshape(2, 24)),
    "AveragePool": (
        modules.AveragePool(2, 3),
        IMAGE,
        np.float64(IMAGE).reshape(2, 2, 2, 3, 2, 3).mean((2, 4)),
    ),
    "Positions of bytes": (modules.Positions(), jnp.zeros(300, jnp.uint8), np.arange(300)),
    "Positions": (modules.Positions(), jnp.array([[7, 7, 7], [1, 2, 3]]), [[0, 1, 2], [0, 1, 2]]),
    "SplitHeads": (modules.SplitHeads(3), X, HEADS),
    "MergeHeads": (modules.MergeHeads() @ modules.SplitHeads(3), X, F),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_matches_numpy(name):
    bond, x, expected = FORWARD[name]
    found = bond.apply(bond.init(jax.random.key(0)), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_matches_loop(causal):
    q, k, v = (np.asarray(t, np.float64) for t in (Q, K, V))
    expected = np.zeros_like(v)
    for b, i in np.ndindex(2, 4):
        seen = range(i + 1) if causal else range(4)
        p = np.exp([q[b, i] @ k[b, j] / 6 for j in seen])
        expected[b, i] = p / p.sum() @ v[b, : len(seen)]
    found = modules.FunctionalAttention(causal).forward((Q, K, V))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rope_rotates_complex_pairs():
    """Pairs are complex numbers times exp(i t / base**(j / half)); scores depend on distance."""
    x = np.asarray(X, np.float64)
    z = x[..., :3] + 1j * x[..., 3:]
    turned = z * np.exp(1j * np.arange(4)[:, None] / 100.0 ** (np.arange(3) / 3))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(modules.RoPE(100.0).forward(X), expected, rtol=1e-5, atol=1e-6)
    same, other = modules.RoPE().forward(jnp.broadcast_to(X[:, :1], (2, 4, 6)))
    scores = same @ other.T
    for distance in range(-3, 4):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
