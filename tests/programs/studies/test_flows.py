"""Residual flows: constants of bits, log-determinants, inverses, and bounds during training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from studies import flows, run_study

pytestmark = pytest.mark.slow

C = 0.9
TINY = flows.Flows(methods=("SpectralBall, Muon", flows.RIVAL), seeds=(0, 1, 2), octaves=(0, 1),
                   blocks=2, width=4, steps=50, batch=8)  # fmt: skip


def draw(seed, pixels=6, blocks=3, width=4):
    """Return parameters with matrices of norm 1, and a batch."""
    rng = np.random.default_rng(seed)
    shapes = {"in": (width, pixels), "out": (pixels, width), "bias": (width,), "sharpness": (),
              "scale": (pixels,), "shift": (pixels,)}  # fmt: skip
    params = {k: rng.normal(size=(blocks, *shape)) for k, shape in shapes.items()}
    for k in ("in", "out"):
        params[k] /= np.linalg.norm(params[k], 2, (-2, -1))[:, None, None]
    params["scale"] *= 0.3
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(5, pixels)))


def test_uniform_density_gives_log2_of_levels():
    assert flows.bits(0.0, 64) == pytest.approx(np.log2(17), rel=1e-15)
    # All mass in the cell of the true image: a density of 17 per pixel, no bits.
    assert flows.bits(64 * np.log(17), 64) == pytest.approx(0, abs=1e-14)


def test_density_integrates_to_mass_of_interval():
    with jax.enable_x64(True):
        params, _ = draw(0, pixels=1)
        nodes, weights = np.polynomial.legendre.leggauss(60)
        density = np.exp(flows.log_density(params, jnp.asarray(nodes[:, None] / 2 + 0.5), C))
        edge = np.log(flows.EDGE) - np.log1p(-flows.EDGE)
        ends = np.ravel(flows.encode(params, jnp.array([[edge], [-edge]]), C)[0])
    mass = norm.cdf(ends[1]) - norm.cdf(ends[0])  # blocks in one dimension increase
    assert weights @ density / 2 == pytest.approx(mass, rel=1e-9)


def test_log_determinant_matches_jacobian_and_series():
    with jax.enable_x64(True):
        params, x = draw(1)
        own = {k: value[0] for k, value in params.items()}
        _, found = flows.block(own, jnp.asarray(x), C)
        whole = jax.vmap(jax.jacobian(lambda v: flows.block(own, v[None], C)[0][0]))(x)
        np.testing.assert_allclose(found, np.linalg.slogdet(whole)[1], rtol=1e-12)
        inner = x * np.exp(own["scale"]) + own["shift"]
        jacobians = jax.vmap(jax.jacobian(lambda v: flows.residual(own, v[None], C)[0][0]))(inner)
    jacobians = np.asarray(jacobians)
    total, power = np.asarray(own["scale"]).sum(), np.eye(x.shape[1])
    for k in range(1, 400):
        power = power @ jacobians
        total = total - (-1) ** k / k * np.trace(power, axis1=1, axis2=2)
    np.testing.assert_allclose(found, total, rtol=1e-12)


def test_residual_is_no_steeper_than_bound():
    with jax.enable_x64(True):
        params, x = draw(2)
        params["sharpness"] += 5
        assert flows.bound(params, C) == pytest.approx(C, rel=1e-12)
        for k in range(3):
            own = {name: value[k] for name, value in params.items()}
            slope = jax.jacobian(lambda v, own=own: flows.residual(own, v[None], C)[0][0])
            assert np.linalg.norm(jax.vmap(slope)(x), 2, (-2, -1)).max() <= C


def test_inversion_counts_contractions():
    params, _ = draw(3)
    levels = np.random.default_rng(4).integers(17, size=(9, 6))
    found = flows.inversion(params, levels, 0.5)
    assert found["error"] < 1e-12
    assert 2 <= found["iterations"] <= 40  # errors of the blocks at least halve in an iteration
    params["out"] *= 1e3
    assert flows.inversion(params, levels, 0.5)["iterations"] is None


@pytest.mark.parametrize("name", ["SpectralBall, Muon", "SpectralBall, Adam", "Stiefel, Muon"])
def test_bound_is_below_one_at_every_step(monkeypatch, name):
    monkeypatch.setattr(flows, "CHUNK", 1)
    flows._programs.cache_clear()
    found, params = flows.trained(name, 1, 0.5, 2, 4, 12, 8, 0.97, 1e-2)
    flows._programs.cache_clear()
    assert 0.5 < found["bound"] <= found["largest_bound"] < 1
    assert found["bound"] == flows.bound(params, 0.97)


@pytest.mark.parametrize(
    ("method", "steps"), [(flows.Capped(-4), 30), (flows.ExactlyCapped(-4), 1)]
)
def test_cap_leaves_small_matrices_unchanged(method, steps):
    values = np.array([3.0, 0.5])
    free = jnp.asarray(values[:, None, None] * np.eye(5, 3) @ np.diag([1, 0.5, 0.1]), jnp.float32)
    _, carry = method.begin(free)
    for _ in range(steps):
        carry = method.carried(free, carry)
    norms = np.linalg.norm(method.weight(free, carry), 2, (-2, -1))
    np.testing.assert_allclose(norms, [1, 0.5], rtol=1e-5)
    np.testing.assert_array_equal(method.weight(free, carry)[1], free[1])


def test_differences_are_paired_with_rival():
    def row(name, seed, value, worst):
        tried = {"rates": [0.1, 0.2], "bits": [2, 3]}
        own = {"train_bits": 1.0, "bound": 0.9, "milliseconds": 1.0, "rate": 0.1, "tried": tried}
        own |= {"method": name, "seed": seed, "bits": value}
        return own | dict.fromkeys(flows.WORST, worst)

    values = {flows.RIVAL: (2.0, 3.0), "Stiefel, Muon": (1.5, 2.6)}
    rows = [row(name, k, v, k + 1) for name, own in values.items() for k, v in enumerate(own)]
    found = TINY.summarise([*rows, *({"method": flows.GAUSSIAN, "bits": v} for v in (4.0, 5.0))])
    assert found["Stiefel, Muon"]["beyond"]["mean"] == pytest.approx(-0.45)
    assert found["Stiefel, Muon"]["iterations"] == 2
    assert found["Stiefel, Muon"]["edge"]
    assert found[flows.GAUSSIAN]["beyond"]["mean"] == pytest.approx(2)


def test_best_rate_beats_uniform_density():
    rows = run_study(TINY)["rows"]
    assert rows[0]["rate"] in rows[0]["tried"]["rates"]
    assert rows[0]["bits"] < np.log2(17)
    assert rows[-1].keys() == {"method", "seed", "bits"}


def test_all_methods_start_with_matrices():
    free = jnp.ones((2, 3, 4))
    assert all(method.begin(free)[0] is free for method, *_ in flows.METHODS.values())
