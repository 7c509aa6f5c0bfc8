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
from tests.optim.instances import abstract
from tests.optim.training import drawn

# Shapes and layouts, and the same arrays transposed by hand to (layers, taps, fan out, fan in).
LEAVES: dict[str, tuple[tuple[int, ...], Layout, Any]] = {
    "matrix": ((5, 3), Layout(), lambda x: x[None, None]),
    "stack": ((2, 3, 4), Layout(), lambda x: x[:, None]),
    "flax": ((3, 6), Layout(-2, -1), lambda x: x.T[None, None]),
    "heads": ((4, 2, 3), Layout(-3, (-2, -1)), lambda x: x.reshape(4, 6).T[None, None]),
    "taps": ((2, 3, 5, 4), Layout(taps=(-4, -3)), lambda x: x.reshape(1, 6, 5, 4)),
    "hwio": ((3, 3, 2, 4), Layout(-2, -1, (-4, -3)), lambda x: x.reshape(1, 9, 2, 4).mT),
    "oihw": ((4, 2, 3, 1), Layout(-3, -4, (-2, -1)), lambda x: x[..., 0].transpose(2, 0, 1)[None]),
    "stacked taps": ((2, 3, 3, 4, 2), Layout(taps=(-4, -3)), lambda x: x.reshape(2, 9, 4, 2)),
}
SHAPES = {name: shape for name, (shape, _, _) in LEAVES.items()}
LAYOUTS = {name: layout for name, (_, layout, _) in LEAVES.items()}


def by_hand(name: str, x: Any) -> np.ndarray:
    return LEAVES[name][2](np.asarray(x, np.float64))


def published(grads: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float, float]:
    """Return steps, eta and G by theorem 2 and appendix B, matrix by matrix."""
    layers = {name: by_hand(name, g) for name, g in grads.items()}
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
GRADS = drawn(0, SHAPES)
STATE = optim.agd(LAYOUTS).init(GRADS)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_step_matches_paper(scale):
    grads = jax.tree.map(lambda g: np.float32(scale) * g, GRADS)
    steps, eta, summary = published(grads)
    updates, (measured, _) = update(grads, STATE)
    assert measured.eta == pytest.approx(eta, rel=1e-5)
    assert measured.summary == pytest.approx(summary, rel=1e-5)
    for name, found in updates.items():
        np.testing.assert_allclose(by_hand(name, found), steps[name], rtol=2e-5)


def test_tiny_gradient_gives_tiny_step():
    """The printed formula loses tiny G to rounding in 1 + G."""
    whole, _ = update(GRADS, STATE)
    for tiny in (2.0**-40, 2.0**-100):
        grads = jax.tree.map(lambda g, c=np.float32(tiny): c * g, GRADS)
        updates, (measured, _) = update(grads, STATE)
        assert measured.eta > 0
        assert measured.eta == pytest.approx(float(measured.summary), rel=1e-6)
        ratios = [float(jnp.max(updates[n] / whole[n])) for n in grads]
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)


def test_initial_matrices_are_semi_orthogonal():
    make = jax.jit(lambda key: optim.init_semi_orthogonal(LAYOUTS, key, abstract(SHAPES)))
    weights = make(jax.random.key(0))
    for name, weight in weights.items():
        x = by_hand(name, weight)
        wanted = np.sqrt(x.shape[-2] / x.shape[-1] / x.shape[1])
        np.testing.assert_allclose(np.linalg.svd(x, compute_uv=False), wanted, rtol=1e-5)
    assert np.abs(np.asarray(make(jax.random.key(1))["matrix"] - weights["matrix"])).max() > 0.1


# ReLU networks of two layers that satisfy the paper's other assumptions, in float64.


def loss_and_grads(weights, x, y):
    first, second = weights
    hidden = np.maximum(x @ first.T, 0)
    error = hidden @ second.T - y
    back = error / error.size
    grads = ((back @ second) * (hidden > 0)).T @ x, back.T @ hidden
    return np.sum(error**2) / (2 * error.size), grads


def on_sphere(x):
    return x * np.sqrt(x.shape[-1]) / np.linalg.norm(x, axis=-1, keepdims=True)


def network(rng, examples):
    """Draw weights by prescription 1 (semi-orthogonal or not), inputs and targets."""
    widths = rng.integers(2, 8, size=3)
    weights = []
    for d_in, d_out in itertools.pairwise(widths):
        w = rng.normal(size=(d_out, d_in))
        if rng.random() < 0.5:
            u, _, vt = np.linalg.svd(w, full_matrices=False)
            w = u @ vt
        weights.append(w * np.sqrt(d_out / d_in) / np.linalg.norm(w, 2))
    inputs = on_sphere(rng.normal(size=(examples, widths[0])))
    return weights, inputs, on_sphere(rng.normal(size=(examples, widths[-1])))


def test_majorisation_fails_without_assumption_1():
    """Without assumption 1, some steps of the method end above the majorisation."""
    rng = np.random.default_rng(0)
    above, worse = 0, 0
    for _ in range(800):
        weights, x, y = network(rng, int(rng.integers(1, 3)))
        loss, grads = loss_and_grads(weights, x, y)
        sizes = [np.sqrt(w.shape[0] / w.shape[1]) for w in weights]
        norms = [s * np.linalg.norm(g) for s, g in zip(sizes, grads, strict=True)]
        if min(norms) == 0:
            continue
        summary = np.mean(norms)
        eta = np.log((1 + np.sqrt(1 + 4 * summary)) / 2)
        moved = [w - eta / 2 * s * g / np.linalg.norm(g)
                 for w, s, g in zip(weights, sizes, grads, strict=True)]  # fmt: skip
        after, _ = loss_and_grads(moved, x, y)
        above += after > loss - eta * summary + (np.exp(eta) - 1) ** 2 / 2 + 1e-9
        worse += after > loss
    assert 0 < above < 0.05 * 800
    assert worse == 0


PAIR = {"a": (5, 3), "b": (2, 4, 4)}


def case() -> laws.CheckedTransformation:
    tx = optax.with_extra_args_support(scale_by_agd(Layout()))
    return laws.make_case(tx, drawn(0, PAIR), drawn(1, PAIR), needs_params=False)


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
    bad = whole.grads | {"a": np.where(np.eye(5, 3), np.nan, whole.grads["a"])}
    updates, _ = whole.tx.update(bad, state)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(updates))
