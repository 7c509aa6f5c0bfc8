"""Quantization: the fold keeps the function, laws of the quantizer, Cayley SGD, and a tiny run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Orthogonal
from manifoldmuon.optim import riemannian_sgd
from studies import quantization
from studies.run import run_study

pytestmark = pytest.mark.slow

TINY = quantization.Quantization(
    methods=("none", quantization.RIVAL, "riemannian_sgd, step", "minimize, noise"), inputs=(4,),
    steps=2, width=32, pretraining=2, tuning_seeds=(10,), seeds=(0, 1),
)  # fmt: skip


def orthogonal(rng, *shape):
    return jnp.asarray(np.linalg.qr(rng.normal(size=shape))[0])


def test_fold_keeps_logits():
    rng = np.random.default_rng(60)
    with jax.enable_x64(True):
        weights = quantization.new_network(jax.random.key(60), 11, 64)
        gains = {"norm": jnp.asarray(rng.uniform(0.5, 2, 64))}
        for block in weights["blocks"]:
            block |= {name: jnp.asarray(rng.uniform(0.5, 2, 64)) for name in ("norm1", "norm2")}
        weights |= gains
        size = quantization.HEAD
        heads = orthogonal(rng, quantization.BLOCKS, 64 // size, size, size)
        folded = quantization.fold(weights, {"R1": orthogonal(rng, 64, 64), "R2": heads})
        tokens = jnp.asarray(rng.integers(11, size=(3, quantization.CONTEXT)))
        found, expected = (quantization.logits(w, tokens) for w in (folded, weights))
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        assert float(jnp.abs(folded["blocks"][0]["v"] - weights["blocks"][0]["v"]).max()) > 0.1
        assert all(float(jnp.ptp(folded["blocks"][0][name])) == 0 for name in ("norm1", "norm2"))


def test_rounded_values_are_nearest_levels():
    x = np.random.default_rng(61).normal(size=(5, 40)).astype(np.float32)
    found = np.asarray(quantization.rounded(jnp.asarray(x), 7, -1))
    for row, own in zip(x.astype(np.float64), found, strict=True):
        levels = np.linspace(min(row.min(), 0), max(row.max(), 0), 8)
        nearest = np.abs(row[:, None] - levels).min(axis=1)
        np.testing.assert_allclose(np.abs(own - row), nearest, atol=1e-5)
        assert len(np.unique(np.round(own, 4))) <= 8
    np.testing.assert_array_equal(quantization.rounded(jnp.zeros((2, 3)), 7, -1), 0)


@pytest.mark.parametrize("gradient", [quantization.STEP, quantization.NOISE, quantization.FIXED])
def test_slope_along_input_is_value_or_input(gradient):
    """The quantizer is homogeneous (Euler's theorem); a fixed step passes gradients unchanged."""
    x = jax.random.normal(jax.random.key(62), (4, 30))
    value, slope = jax.jvp(lambda x: quantization.rounded(x, 15, -1, gradient), (x,), (x,))
    fixed = gradient == quantization.FIXED
    np.testing.assert_allclose(slope, x if fixed else value, rtol=0, atol=0 if fixed else 1e-5)


@pytest.mark.parametrize("name", ["none", "random", "Hadamard"])
def test_starts_are_orthogonal(name):
    start = quantization.start_of(name, jax.random.key(64), 64)
    assert {k: v.shape for k, v in start.items()} == {"R1": (64, 64), "R2": (2, 2, 32, 32)}
    assert all(float(Orthogonal().distance(v).max()) < 1e-6 for v in start.values())


def test_cayley_sgd_takes_cayley_transform():
    """Short steps match the exact transform, solved in float64."""
    rng = np.random.default_rng(65)
    point, grad = np.linalg.qr(rng.normal(size=(8, 8)))[0], rng.normal(size=(8, 8))
    params: Any = {"R": jnp.float32(point)}
    tx = quantization.cayley_sgd(lambda count: 0.01)
    updates: Any
    updates, _ = tx.update({"R": jnp.float32(grad)}, tx.init(params), params)
    x = point.T
    half = -grad.T @ point - 0.5 * x @ (point @ -grad.T @ point)
    skew, eye = half - half.T, np.eye(8)
    wanted = np.linalg.solve(eye - 0.005 * skew, (eye + 0.005 * skew) @ x).T
    np.testing.assert_allclose(params["R"] + updates["R"], wanted, atol=1e-6)


def test_long_cayley_steps_leave_manifold():
    """Five fixed-point steps are no Cayley transform; the retraction stays within rounding."""
    start: Any = quantization.start_of("none", jax.random.key(66), 32)
    grads = jax.tree.map(lambda x: jnp.zeros_like(x).at[..., 0, 1].set(1), start)
    far = []
    for tx in (
        riemannian_sgd(9.0, quantization.GEOMETRY),
        quantization.cayley_sgd(lambda count: 9.0),
    ):
        updates: Any
        updates, _ = tx.update(grads, tx.init(start), start)
        far.append(float(Orthogonal().distance(start["R1"] + updates["R1"])))
    assert far[0] < 32 * jnp.finfo(jnp.float32).eps
    assert far[1] > 1e-3


def test_study_summarises_methods_and_budgets():
    record = run_study(TINY)
    assert list(record["summary"]) == ["4 bits, equal steps", "4 bits, equal seconds"]
    same, timed = record["summary"].values()
    assert list(same) == list(TINY.methods)
    assert list(timed) == ["riemannian_sgd, step", "minimize, noise"]
    assert all(row["change"] < 1e-5 for row in record["rows"])
    assert same[quantization.RIVAL]["over_rival"]["mean"] == 0
