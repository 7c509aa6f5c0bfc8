"""Second moments per neuron, against the published algorithm in NumPy's float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manifoldmuon import contrib, optim
from manifoldmuon.manifolds import Euclidean, LaidOut, Layout, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import ConvRMSToRMS, RMSToRMS, Spectral
from manifoldmuon.testing import check_sharding
from tests.linalg.instances import polar
from tests.optim.training import train
from tests.oracles.gradients import GRADIENT_FAMILIES, gradient_sequence

MUON = Euclidean(Spectral())
SHAPES = {"w": (6, 4), "kernel": (3, 5), "stack": (2, 3, 4), "fused": (6, 3), "bias": (4,)}
GEOMETRY = {
    "w": MUON,
    "kernel": MUON.transposed(),
    "stack": MUON.stacked(),
    "fused": LaidOut(MUON, Layout(out_blocks=2)),
    "bias": Euclidean(),
}
# The same arrays as stacks of matrices (copies, fan out, fan in).
MATRICES = {
    "w": lambda x: x[None],
    "kernel": lambda x: x.T[None],
    "stack": lambda x: x,
    "fused": lambda x: x.reshape(2, 3, 3),
}


def published(grads: list[np.ndarray], rate: float, b1: float, b2: float, decay: float, start):
    """Run algorithm 1 of arXiv:2510.05491 on a matrix, rescaled to the direction's norm."""
    weight, momentum, v = start, np.zeros_like(start), np.zeros(len(start))
    for grad in grads:
        momentum = b1 * momentum + (1 - b1) * grad
        direction = polar(momentum)
        v = b2 * v + (1 - b2) * np.mean(direction**2, axis=1)
        scaled = direction / np.sqrt(v)[:, None]
        scaled *= np.linalg.norm(direction) / np.linalg.norm(scaled)
        weight = weight - rate * (scaled + decay * weight)
    return weight


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Rows differ widely in size; otherwise the second moments would change little.
    sizes = {k: 10.0 ** rng.uniform(-2, 1, size=s[:-1])[..., None] for k, s in SHAPES.items()}
    return {k: (sizes[k] * rng.standard_normal(s)).astype(np.float32) for k, s in SHAPES.items()}


def test_four_steps_match_published_algorithm():
    start, batches = drawn(0), [drawn(seed) for seed in range(1, 5)]
    # An average and a sum of gradients have the same direction.
    given: Any = {"nesterov": False, "weight_decay": 0.3}
    tx = contrib.normuon(0.1, GEOMETRY, 0.9, 0.8, method=None, **given)
    found, _ = train(tx, start, batches)
    for name, cut in MATRICES.items():
        each = zip(cut(start[name]), *(cut(batch[name]) for batch in batches), strict=True)
        wanted = [
            published([g.astype(float) for g in grads], 0.1, 0.9, 0.8, 0.3, weight.astype(float))
            for weight, *grads in each
        ]
        np.testing.assert_allclose(cut(found[name]), wanted, rtol=1e-4, atol=1e-4)
    muon, _ = train(optim.muon(0.1, GEOMETRY, 0.9, **given), start, batches)
    # Four steps with four roundings each of numbers below 1.
    eps = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found["bias"], muon["bias"], rtol=0, atol=16 * eps)


def once(tx: Any, update: Any, params: Any) -> tuple[Any, Any]:
    return jax.jit(tx.update)(update, tx.init(params), params)


def test_conv_channel_is_one_neuron():
    kernel = Euclidean(ConvRMSToRMS()).with_axes(-2, -1, (-4, -3))
    rng = np.random.default_rng(0)
    update = np.float32(rng.standard_normal((3, 3, 2, 4)) * [1, 10, 0, 0.1])
    tx = contrib.scale_by_neuron_rms(kernel)
    found, state = once(tx, update, update)
    squares = np.mean(np.float64(update) ** 2, axis=(0, 1, 2))
    np.testing.assert_allclose(state.nu[""], 0.05 * squares, rtol=1e-5)
    sizes = np.sqrt(np.mean(np.float64(found) ** 2, axis=(0, 1, 2)))
    np.testing.assert_allclose(sizes / sizes[0], [1, 1, 0, 1], rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(update), rtol=1e-5)


@pytest.mark.slow
def test_scaled_step_on_manifold_stays_tangent():
    """The expected step is the tangent part of the scaled rows, at the direction's length."""
    manifold = Stiefel(solver=ProjectedPolar())
    w = np.float64(manifold.random_point(jax.random.key(0), (6, 3), jnp.float32))
    ambient = np.random.default_rng(0).standard_normal((6, 3))
    direction = ambient - w @ (w.T @ ambient + ambient.T @ w) / 2
    scaled = direction / np.sqrt(0.05 * np.mean(direction**2, axis=1))[:, None]
    wanted = scaled - w @ (w.T @ scaled + scaled.T @ w) / 2
    wanted *= np.linalg.norm(direction) / np.linalg.norm(wanted)
    tx = contrib.scale_by_neuron_rms(manifold)
    point = np.float32(w)
    found, _ = once(tx, np.float32(direction), point)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    inside = w.T @ np.asarray(found, float)
    assert np.abs(inside + inside.T).max() < 1e-5
    links = optim.scale_by_steepest(manifold), tx, optax.scale(-0.1), optim.retract(manifold)
    trained, _ = train(optim.chain(*links), point, [np.float32(ambient)] * 3)
    assert float(manifold.distance(jnp.asarray(trained))) < 1e-5


def test_nan_does_not_enter_second_moments():
    geometry = Euclidean(RMSToRMS())
    good = np.ones((3, 2), np.float32)
    bad = good * np.array([[1], [np.nan], [1]], np.float32)
    tx: Any = contrib.scale_by_neuron_rms(geometry)
    update = jax.jit(tx.update)
    _, before = update(good, tx.init(good), good)
    found, after = update(bad, before, good)
    assert np.isnan(found).any()
    np.testing.assert_array_equal(after.nu[""][1], before.nu[""][1])
    assert np.isfinite(after.nu[""]).all()


def test_switching_gradients_keep_step_length():
    """A row that was zero for many steps has a tiny running mean; the step must not grow."""
    shape, geometry = (7, 4), Euclidean(Spectral())
    steepest, link = optim.scale_by_steepest(geometry), contrib.scale_by_neuron_rms(geometry)

    @jax.jit
    def run(grads):
        point = jnp.zeros(shape)

        def step(states, grad):
            direction, first = steepest.update(grad, states[0], point)
            scaled, second = link.update(direction, states[1], point)
            return (first, second), (direction, scaled)

        return jax.lax.scan(step, (steepest.init(point), link.init(point)), grads)[1]

    for family in GRADIENT_FAMILIES:
        grads = np.float32(gradient_sequence(family, shape, 300, seed=2))
        direction, scaled = (np.linalg.norm(x, axis=(1, 2)) for x in run(grads))
        np.testing.assert_allclose(scaled, direction, rtol=1e-5)


def test_injected_decay_on_explicit_mesh():
    mesh = jax.make_mesh((1,), ("devices",), (jax.sharding.AxisType.Explicit,))
    shardings = {"w": jax.sharding.NamedSharding(mesh, jax.P("devices"))}
    params, grads = {"w": jnp.ones((4, 2))}, {"w": jnp.asarray(drawn(7)["w"][:4, :2])}
    make = optax.inject_hyperparams(contrib.scale_by_neuron_rms, static_args="geometry")
    check_sharding(make(geometry=MUON, decay=0.9), params, grads, shardings)
