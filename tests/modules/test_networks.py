"""Whole architectures: published constants, forward maps by hand, well-normedness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from manifoldmuon import modules
from manifoldmuon.manifolds import EmbeddingRows, Stiefel
from manifoldmuon.modules import mlp
from tests.compiled import ask
from tests.modules import measure

TEXT = jnp.array([[2, 0, 5, 2, 1], [1, 1, 6, 3, 0]], jnp.int32)


def budgets(module: modules.Module) -> list[float]:
    return jax.tree.leaves(module.budgets())


def test_character_gpt_constants():
    """The Modula package's hello-gpt: 65 characters, width 128, 4 heads, 4 blocks."""
    net = modules.gpt(65, 128, 4, 4)
    assert net.mass == pytest.approx(7)
    assert net.sensitivity == pytest.approx(1)
    embed, query, key, value, exit_, up, down, head = budgets(net)
    assert [embed, head] == pytest.approx([1 / 7] * 2)
    assert [exit_, up, down] == pytest.approx([0.2381] * 3, abs=5e-5)
    assert [query, key, value] == pytest.approx([0.7143] * 3, abs=5e-5)
    shapes = [leaf.shape for leaf in jax.tree.leaves(measure.shapes_of(net))]
    square = (4, 128, 128)
    assert shapes == [(65, 128), *[square] * 4, (4, 512, 128), (4, 128, 512), (65, 128)]


@pytest.mark.parametrize(
    ("net", "mass", "shares"),
    [
        (modules.gpt(7, 6, 2, 3, context=5, layer_norm=True), 7, [1 / 2, 1 / 2]),
        (modules.res_mlp(3, 5, 6, 4, mass=2.0), 4, [1]),
        (modules.res_cnn(3, 2, 6, 4), 22, [1]),
        (mlp(3, 5, 6, 4), 4, [1]),
    ],
)
def test_masses_and_sensitivities(net, mass, shares):
    assert net.mass == pytest.approx(mass)
    assert net.sensitivity == pytest.approx(1)
    masses = jax.tree.leaves(net.masses())
    assert masses[: len(shares)] == pytest.approx(shares)
    assert masses[-1] == pytest.approx(1)
    assert sum(masses) == pytest.approx(mass)
    # The first layers move by their share of the total mass, halved embeddings by twice as much.
    assert budgets(net)[: len(shares)] == pytest.approx([1 / mass] * len(shares))


def test_rescnn_on_single_pixel_matches_resmlp():
    """On a single-pixel image only the middle taps count: the network is a ResMLP."""
    cnn, mlp = modules.res_cnn(3, 5, 6, 2), modules.res_mlp(3, 5, 6, 2, mass=20.0)
    w, x = params_of(cnn), measure.gaussian(1, 2, 5)
    first, blocks, last = jax.tree.leaves(w)
    leaves = [first[1, 1], blocks[:, :, 1, 1], last]
    middle = jax.tree.unflatten(jax.tree.structure(params_of(mlp)), leaves)
    found, expected = ask(cnn.apply, w, x[:, None, None]), ask(mlp.apply, middle, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert modules.res_cnn(3, 2, 6, 2, pool=2).mass == 22


def test_mlp_has_equal_budgets():
    published = modules.ReLU(modules.ReLU.BALANCED)
    assert published.sensitivity == pytest.approx(1 / np.sqrt(2), rel=1e-15)
    assert budgets(mlp(10, 784, 256, 3)) == pytest.approx([1 / 3] * 3)
    expected = [2 / 3, 2**0.5 / 3, 1 / 3]
    assert budgets(mlp(10, 784, 256, 3, published)) == pytest.approx(expected)


def test_constrained_gpt_manifolds():
    net = modules.gpt(7, 6, 2, 3).constrained()
    kinds = [type(getattr(x, "manifold", x)) for x in jax.tree.leaves(net.geometry())]
    assert kinds == [EmbeddingRows] + [Stiefel] * 7
    assert net.unconstrained() == modules.gpt(7, 6, 2, 3)


def params_of(net: modules.Module, seed: int = 0):
    return measure.random_like(measure.shapes_of(net), seed)


def flat(params) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]


def test_mlp_forward_matches_numpy():
    net = mlp(3, 5, 6, 4)
    w, x = params_of(net), measure.gaussian(1, 2, 5)
    (first, middle, last), h = flat(w), np.float64(x)
    for matrix in (first, *middle):
        h = np.maximum(h @ matrix.T, 0)
    np.testing.assert_allclose(ask(net.apply, w, x), h @ last.T, rtol=1e-4, atol=1e-4)


def test_resmlp_forward_matches_numpy():
    net = modules.res_mlp(3, 5, 6, 2, block_depth=2)
    w, x = params_of(net), measure.gaussian(1, 2, 5)
    first, blocks, last = flat(w)
    h = np.float64(x) @ first.T
    for block in blocks:
        r = h
        for matrix in block:
            r = np.abs(r / np.sqrt((r**2).mean(-1, keepdims=True)) @ matrix.T)
            r = r - r.mean(-1, keepdims=True)
        h = h / 2 + r / 2
    np.testing.assert_allclose(ask(net.apply, w, x), h @ last.T, rtol=1e-4, atol=1e-4)


def gpt_by_hand(params, line, context, layer_norm, blocks=2, heads=2):
    """Evaluate a GPT by loops over blocks, heads and tokens."""

    def norm(h):
        centered = h - h.mean(-1, keepdims=True)
        return centered / h.std(-1, keepdims=True) if layer_norm else h

    def turn(h):
        if context is not None:
            return h
        half = h.shape[-1] // 2
        z = h[..., :half] + 1j * h[..., half:]
        z = z * np.exp(1j * np.arange(len(h))[:, None] / 1e4 ** (np.arange(half) / half))
        return np.concatenate([z.real, z.imag], -1)

    *tables, wq, wk, wv, wo, up, down, head = flat(params)
    h = tables[0][line]
    if context is not None:
        h = h / 2 + tables[1][: len(line)] / 2
    part = 1 / (2 * blocks)
    for layer in range(blocks):
        x, merged = norm(h), []
        for one in np.split(np.arange(wq.shape[1]), heads):
            q, k, v = (x @ matrix[layer][one].T for matrix in (wq, wk, wv))
            q, k, rows = turn(q), turn(k), []
            for t in range(len(line)):
                p = np.exp(q[t] @ k[: t + 1].T / len(one))
                rows.append(p / p.sum() @ v[: t + 1])
            merged.append(np.stack(rows) / 3)
        h = (1 - part) * h + part * np.concatenate(merged, -1) @ wo[layer].T
        x = norm(h) @ up[layer].T
        h = (1 - part) * h + part * (x * scipy.special.ndtr(x) / 1.128904145) @ down[layer].T
    return norm(h) @ head.T


@pytest.mark.parametrize(("context", "layer_norm"), [(None, False), (5, True)])
def test_gpt_forward_matches_loops(context, layer_norm):
    net = modules.gpt(7, 8, 2, 2, context=context, layer_norm=layer_norm)
    w = jax.tree.map(lambda p: 0.5 * p, params_of(net))
    expected = [gpt_by_hand(w, line, context, layer_norm) for line in np.asarray(TEXT)]
    np.testing.assert_allclose(ask(net.apply, w, TEXT), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_except("attention")
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_networks_are_well_normed(name):
    """Weight steps of modular norm 1 move the output by at most 1, unit inputs by `sensitivity`."""
    if name == "residual":
        block = modules.ReLU() @ modules.Linear(6, 6)
        net = modules.Linear(6, 6) @ modules.residual(block, 3)
        x, size = measure.unit_tokens(0, 6), measure.tokens
    else:
        net, x, size = modules.attention(6, 1), measure.unit_tokens(0, 3, 6), measure.tokens

    @jax.jit
    def climb(w, x, aim):
        """Return the output and its change under the steepest step for a direction."""
        y, pull = jax.vjp(net.apply, w, x)
        grads, up = pull(aim)
        step = measure.steepest_step(net, grads, w)
        by_weights = jax.jvp(lambda w: net.apply(w, x), (w,), (step,))[1]
        by_input = jax.jvp(lambda x: net.apply(w, x), (x,), (up,))[1]
        return y, by_weights, by_input, up

    w = jax.jit(net.init)(jax.random.key(0))
    aim, moved = jnp.ones_like(jax.eval_shape(net.apply, w, x)), []
    for seed in range(6):
        y, by_weights, by_input, up = climb(w, x, aim)
        moved.append(size(by_weights))
        assert size(by_input) <= net.sensitivity * size(up) * (1 + 1e-5)
        aim = by_weights if seed % 2 else measure.gaussian(seed, *y.shape)
    assert 0.1 < max(moved) <= 1 + 1e-5
    assert measure.largest(y) > 0


def test_two_layer_sharpness_is_attained():
    """For orthogonal weights and steps along them, the rules' (1/2, 1, 0) are exact."""
    net = modules.Linear(4, 4) @ modules.Linear(4, 4)
    assert net.sharpness == pytest.approx((0.5, 1, 0))
    w, x = (jnp.eye(4),) * 2, measure.unit_tokens(0, 4)
    step = (0.5 * jnp.eye(4),) * 2
    assert float(jax.jit(net.norm)(step)) == pytest.approx(1)
    by_weights = measure.push_twice(lambda w: net.apply(w, x), w, step, step)
    assert measure.tokens(by_weights) == pytest.approx(net.sharpness.alpha, rel=1e-5)
    still = (jax.tree.map(jnp.zeros_like, w), x)
    mixed = measure.push_twice(lambda p: net.apply(*p), (w, x), (step, jnp.zeros(4)), still)
    assert measure.tokens(mixed) == pytest.approx(net.sharpness.beta, rel=1e-5)


def test_weighted_attention_sharpness_by_hand():
    net = modules.FunctionalAttention() @ ((modules.Linear(4, 4),) * 3)
    assert net.sharpness == pytest.approx((3, 10, 27))


@pytest.mark.parametrize(
    "net", [modules.Conv2D(4, 4) ** 3, (2 * modules.Conv2D(4, 4) @ modules.ReLU()) ** 3]
)
def test_stacked_convolutions_unroll_on_cpus(net):
    """Forward and backward passes are unrolled; a stack of matrices loops in both."""

    def loops(net, x):
        slope = jax.grad(lambda params: jnp.sum(net.apply(params, x) ** 2))
        return jax.jit(slope).lower(measure.shapes_of(net)).as_text().count("while")

    if jax.default_backend() == "cpu":
        assert loops(net, jnp.ones((2, 6, 6, 4))) == 0
    assert loops(modules.Linear(4, 4) ** 3, jnp.ones((2, 4))) > 0
