"""Points off the set: the gap is 1 and a step returns; points far off give NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.manifolds import Grassmann, Orthogonal, Stiefel
from manifoldmuon.manifolds.retractions import QR
from manifoldmuon.manifolds.solvers import DualAscent, ProjectedPolar, Resolvents

CASES: dict[str, tuple[Any, tuple[int, int]]] = {
    "default": (Stiefel(), (16, 6)),
    "for training": (Stiefel(solver=ProjectedPolar()), (16, 6)),
    "resolvents": (Stiefel(solver=Resolvents()), (16, 6)),
    "dual ascent": (Stiefel(solver=DualAscent(steps=10)), (16, 6)),
    "QR": (Stiefel(retraction=QR()), (16, 6)),
    "wide, scaled": (Stiefel(3.0), (5, 12)),
    "orthogonal": (Orthogonal(), (8, 8)),
    "subspace": (Grassmann(), (12, 5)),
}


def spectra(shape: tuple[int, int], *values: Any) -> np.ndarray:
    """Return a matrix for each list of singular values."""
    rng = np.random.default_rng(5)
    k = min(shape)
    left, right = (np.linalg.qr(rng.standard_normal((side, k)))[0] for side in shape)
    return np.asarray([left * np.broadcast_to(s, k) @ right.T for s in values], np.float32)


@pytest.mark.slow_except("default", "QR")
@pytest.mark.parametrize("name", CASES)
def test_step_returns_to_set_or_is_nan(name):
    """Rounding a Gram matrix costs an eps, and a singular value half of that, times a few sums."""
    manifold, shape = CASES[name]
    k = min(shape)
    off = spectra(shape, 0.8, 0.9, 1.05, 1.2, np.linspace(0.8, 1.2, k))
    absurd = spectra(shape, 0.0, 0.01, 0.5, 2.0, 30.0, 1e6, np.linspace(0.5, 2, k), np.nan)
    points = manifold.norm.scale * np.concatenate([off, absurd])
    grads = np.random.default_rng(6).standard_normal(points.shape).astype(np.float32)

    @jax.jit
    def step(points, grads):
        answer = manifold.steepest(points, grads, manifold.init_dual(points.shape))
        return answer, manifold.retract(points, -0.02 * answer.direction)

    answer, moved = step(points, grads)
    count = len(off)
    assert (answer.gap[:count] == 1).all()
    assert (manifold.distance(moved[:count]) < 2 * max(shape) * np.finfo(np.float32).eps).all()
    assert np.isnan(moved[count:]).all()


@pytest.mark.parametrize("off", [0.01, 0.02, 0.1, 1.0])
def test_single_far_singular_value_is_detected(off):
    shape = (64, 32)
    values = np.ones(32)
    values[7] += off
    near, far = spectra(shape, 1.0, values)
    grad = jnp.asarray(np.random.default_rng(6).standard_normal(shape), jnp.float32)
    gap = jax.jit(lambda point: Stiefel().steepest(point, grad).gap)
    assert gap(near) < 0.01
    if off > 0.015:  # the limit, over the eighth root of the probe's part along this vector
        assert gap(far) == 1


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev], ids=["forward", "reverse"])
def test_retraction_derivative_from_far_point(mode):
    """Compare with differences, in float64."""
    point, turn, step, weights = np.random.default_rng(8).standard_normal((4, 6, 3))

    def value(t):
        return jnp.sum(weights * Stiefel().retract(point + t * turn, jnp.asarray(0.1 * step)))

    with jax.enable_x64(True):
        h, value = 1e-6, jax.jit(value)
        difference = (value(jnp.array(h)) - value(jnp.array(-h))) / (2 * h)
        found = jax.jit(mode(value))(jnp.array(0.0))
        assert abs(found - difference) < 1e-7 * (1 + abs(difference))
