"""Automatic gradient descent against the published formulas in NumPy, in float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import optim
from manifoldmuon.manifolds import Layout
from manifoldmuon.optim._agd import scale_by_agd
from manifoldmuon.testing import _transformation_laws as laws

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (5, 3),
    "stack": (2, 3, 4),
    "flax": (3, 6),
    "heads": (4, 2, 3),
    "taps": (2, 3, 5, 4),
    "hwio": (3, 3, 2, 4),
    "oihw": (4, 2, 3, 1),
    "stacked taps": (2, 3, 3, 4, 2),
}
LAYOUTS = {
    "matrix": Layout(),
    "stack": Layout(),
    "flax": Layout(in_axes=-2, out_axes=-1),
    "heads": Layout(in_axes=-3, out_axes=(-2, -1)),
    "taps": Layout(taps=(-4, -3)),
    "hwio": Layout(in_axes=-2, out_axes=-1, taps=(-4, -3)),
    "oihw": Layout(in_axes=-3, out_axes=-4, taps=(-2, -1)),
    "stacked taps": Layout(taps=(-4, -3)),
}
# The same arrays, transposed by hand to (layers, taps, fan out, fan in).
BY_HAND = {
    "matrix": lambda x: x[None, None],
    "stack": lambda x: x[:, None],
    "flax": lambda x: x.T[None, None],
    "heads": lambda x: x.reshape(4, 6).T[None, None],
    "taps": lambda x: x.reshape(1, 6, 5, 4),
    "hwio": lambda x: x.reshape(1, 9, 2, 4).swapaxes(-1, -2),
    "oihw": lambda x: x.transpose(2, 3, 0, 1).reshape(1, 3, 4, 2),
    "stacked taps": lambda x: x.reshape(2, 9, 4, 2),
}


def drawn(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: scale * rng.normal(size=shape) for name, shape in SHAPES.items()}


def single(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def published(grads: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float, float]:
    """Return steps, eta and G by theorem 2 and appendix B, matrix by matrix."""
    layers = {name: BY_HAND[name](g) for name, g in grads.items()}
    depth = sum(len(x) for x in layers.values())
    summary, steps = 0.0, {}
    for name, x in layers.items():
        _, taps, d_out, d_in = x.shape
        size = np.sqrt(d_out / d_in) / np.sqrt(taps)
        steps[name] = np.zeros_like(x)
        for index in itertools.product(*map(range, x.shape[:2])):
            norm = np.linalg.norm(x[index])
            summary += size * norm / depth
            steps[name][index] = size * x[index] / norm
    eta = np.log((1 + np.sqrt(1 + 4 * summary)) / 2)
    return {name: -eta / depth * x for name, x in steps.items()}, eta, summary


update = jax.jit(optim.agd(LAYOUTS).update)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_step_matches_paper(scale):
    grads = drawn(scale=scale)
    steps, eta, summary = published(grads)
    state = optim.agd(LAYOUTS).init(single(grads))
    updates, (measured, _) = update(single(grads), state)
    assert measured.eta == pytest.approx(eta, rel=1e-5)
    assert measured.summary == pytest.approx(summary, rel=1e-5)
    for name, found in updates.items():
        np.testing.assert_allclose(BY_HAND[name](np.asarray(found)), steps[name], rtol=2e-5)


def test_tiny_gradient_gives_tiny_step():
    """The printed formula loses tiny G to rounding in 1 + G."""
    state = optim.agd(LAYOUTS).init(single(drawn()))
    whole, _ = update(single(drawn()), state)
    for power in (-40, -100):
        grads = single(drawn())
        updates, (measured, _) = update(jax.tree.map(lambda g, p=power: g * 2.0**p, grads), state)
        assert measured.eta > 0
        assert measured.eta == pytest.approx(float(measured.summary), rel=1e-6)
        ratios = [float(jnp.max(updates[n] / whole[n])) for n in grads]
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)


def test_initial_matrices_are_semi_orthogonal():
    templates = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    make = jax.jit(lambda key: optim.init_semi_orthogonal(LAYOUTS, key, templates))
    weights = make(jax.random.key(0))
    for name, weight in weights.items():
        x = BY_HAND[name](np.asarray(weight, np.float64))
        wanted = np.sqrt(x.shape[-2] / x.shape[-1] / x.shape[1])
        np.testing.assert_allclose(np.linalg.svd(x, compute_uv=False), wanted, rtol=1e-5)
    assert np.abs(np.asarray(make(jax.random.key(1))["matrix"] - weights["matrix"])).max() > 0.1


# Networks that satisfy the paper's other assumptions, and their gradients, in float64.


def forward(weights, x):
    hidden = [x]
    for k, w in enumerate(weights):
        z = hidden[-1] @ w.T
        hidden.append(z if k == len(weights) - 1 else np.maximum(z, 0))
    return hidden


def loss_and_grads(weights, x, y):
    hidden = forward(weights, x)
    error = hidden[-1] - y
    back = error / error.size
    grads: list[Any] = [None] * len(weights)
    for k in reversed(range(len(weights))):
        grads[k] = back.T @ hidden[k]
        back = back @ weights[k] * (hidden[k] > 0)
    return np.sum(error**2) / (2 * error.size), grads


def on_sphere(x):
    return x * np.sqrt(x.shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)


def network(rng, depth, examples):
    """Draw weights by prescription 1 (semi-orthogonal or not), inputs and targets."""
    widths = rng.integers(2, 8, size=depth + 1)
    weights = []
    for d_in, d_out in itertools.pairwise(widths):
        w = rng.normal(size=(d_out, d_in))
        if rng.random() < 0.5:
            u, _, vt = np.linalg.svd(w, full_matrices=False)
            w = u @ vt
        weights.append(w * np.sqrt(d_out / d_in) / np.linalg.norm(w, 2))
    inputs = on_sphere(rng.normal(size=(examples, widths[0])))
    return weights, inputs, on_sphere(rng.normal(size=(examples, widths[-1])))


def sizes(weights):
    return [np.sqrt(w.shape[0] / w.shape[1]) for w in weights]


def test_majorisation_fails_without_assumption_1():
    """Without assumption 1, some steps of the method end above the majorisation."""
    rng = np.random.default_rng(0)
    above, worse = 0, 0
    for _ in range(800):
        weights, x, y = network(rng, 2, int(rng.integers(1, 3)))
        loss, grads = loss_and_grads(weights, x, y)
        norms = [s * np.linalg.norm(g) for s, g in zip(sizes(weights), grads, strict=True)]
        if min(norms) == 0:
            continue
        summary = np.mean(norms)
        eta = np.log((1 + np.sqrt(1 + 4 * summary)) / 2)
        moved = [w - eta / 2 * s * g / np.linalg.norm(g)
                 for w, s, g in zip(weights, sizes(weights), grads, strict=True)]  # fmt: skip
        after, _ = loss_and_grads(moved, x, y)
        above += after > loss - eta * summary + (np.exp(eta) - 1) ** 2 / 2 + 1e-9
        worse += after > loss
    assert 0 < above < 0.05 * 800
    assert worse == 0


PAIR = {"a": (5, 3), "b": (2, 4, 4)}


def case() -> laws.CheckedTransformation:
    tx = optax.with_extra_args_support(scale_by_agd(Layout()))
    rng = np.random.default_rng(0)
    params, grads = (single({n: rng.normal(size=s) for n, s in PAIR.items()}) for _ in range(2))
    return laws.make_case(tx, params, grads, needs_params=False)


# A step depends on all layers, so checks that assume independent leaves are skipped.
COUPLED = {"_holes", "_nan_in_one_leaf", "_masked_partition_and_chain"}


@pytest.mark.slow
def test_works_with_optax_wrappers():
    whole = case()
    for check in (*laws.BASICS, *laws.WRAPPERS):
        if check.__name__ not in COUPLED:
            check(whole)
    gained = optim.agd(Layout(), 0.5)
    laws.check_injected(
        optax.inject_hyperparams(optim.agd)(layouts=Layout(), gain=0.5),
        whole._replace(tx=optax.GradientTransformationExtraArgs(gained.init, gained.update)),
    )


def test_masked_subtree_has_own_depth():
    whole = case()
    layouts = {"a": Layout(), "b": Layout()}
    alone = {"a": whole.grads["a"]}
    tx = optim.agd({"a": Layout()})
    expected: Any = tx.update(alone, tx.init(alone))[0]
    masked = optax.masked(optim.agd(layouts), {"a": True, "b": False})
    found: Any = masked.update(whole.grads, masked.init(whole.params), whole.params)[0]
    np.testing.assert_allclose(found["a"], expected["a"], rtol=1e-5)
    np.testing.assert_array_equal(found["b"], whole.grads["b"])


def test_zero_gradients_stop_and_nan_spreads():
    whole = case()
    zeros = jax.tree.map(jnp.zeros_like, whole.grads)
    state: Any
    updates: Any
    updates, state = whole.tx.update(zeros, whole.tx.init(whole.params))
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert state.eta == 0
    one: Any = whole.grads | {"a": zeros["a"]}
    updates, _ = whole.tx.update(one, state)
    assert not np.any(updates["a"])
    assert np.all(np.isfinite(updates["b"]))
    bad = whole.grads | {"a": whole.grads["a"].at[0, 0].set(jnp.nan)}
    updates, _ = whole.tx.update(bad, state)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(updates))
