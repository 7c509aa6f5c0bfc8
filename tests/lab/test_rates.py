"""Learning-rate transfer: best rates of parabolas, known drifts, and features in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manifoldmuon.lab import BestRate, best_rate, excess_loss
from manifoldmuon.modules import Linear, mlp
from studies.networks.descent import feature_changes
from studies.transfer.drift import rate_drift

EXPONENTS = list(range(-6, 3))


def known(value):
    """Return `value` after asserting that it is not None."""
    assert value is not None
    return value


def curve(best, depth=1.0):
    """Return losses with a logarithm that is a parabola in log2 of the rate."""
    return np.exp(0.3 * (np.array(EXPONENTS) - best) ** 2 - depth).tolist()


def lowest(losses):
    """Return the best rate of a single seed, and its edge of the grid or ""."""
    found = best_rate(EXPONENTS, [losses])
    (rate,) = found.by_seed
    assert found.log2_rate == rate
    assert found.interval is None
    return rate, found.edge


@pytest.mark.parametrize("best", [-4.9, -2.0, 0.37])
def test_best_rate_is_minimum_of_parabola(best):
    rate, edge = lowest(curve(best))
    assert edge == ""
    np.testing.assert_allclose(known(rate), best)


def test_best_rate_at_edge_is_none():
    for best, edge in ((-7.0, "below"), (4.0, "above")):
        assert lowest(curve(best)) == (None, edge)
    found = best_rate(EXPONENTS, [curve(0.0), curve(4.0)])
    assert (found.log2_rate, found.edge, found.by_seed[1]) == (None, "above", None)
    assert lowest([None] * len(EXPONENTS))[1]


def test_divergence_counts_as_largest_loss():
    """The fit uses the largest finite loss instead and stays within half a grid step."""
    losses = curve(-1.0)
    rate, edge = lowest([*losses[:6], None, float("inf"), float("nan")])
    assert edge == ""
    assert -1.5 <= known(rate) < -1


def test_identical_curves_have_no_drift():
    curves = [curve(-2.1), curve(-1.9), curve(-2.3)]
    found = rate_drift({size: best_rate(EXPONENTS, curves) for size in (32, 64, 128)})
    assert abs(known(found.octaves_per_doubling)) < 1e-12
    assert abs(known(found.span)) < 1e-12
    low, high = known(found.interval)
    assert low < 0 < high
    same = rate_drift({size: best_rate(EXPONENTS, [curve(-2.0)] * 3) for size in (32, 64)})
    np.testing.assert_allclose(known(same.span_interval), 0, atol=1e-9)
    assert same.steady == "yes"


def test_drift_interval_covers_known_drift():
    """The interval covers the true drift in 95 % of the experiments."""
    rng = np.random.default_rng(1)
    sizes, per_doubling, covered = (32, 64, 128, 256), -0.4, 0
    for _ in range(400):
        best = {}
        for size in sizes:
            middles = per_doubling * np.log2(size / 32) + 0.2 * rng.normal(size=4)
            best[size] = BestRate(None, None, "", middles.tolist())
        low, high = known(rate_drift(best).interval)
        covered += low <= per_doubling <= high
    assert 0.92 < covered / 400 < 0.98
    best = {s: best_rate(EXPONENTS, [curve(-0.4 * np.log2(s / 32))] * 2) for s in sizes}
    exact = rate_drift(best)
    np.testing.assert_allclose(known(exact.octaves_per_doubling), -0.4)
    np.testing.assert_allclose(known(exact.span), -1.2)
    assert exact.steady == "no"


def test_sizes_at_an_edge_are_ignored():
    best = {size: best_rate(EXPONENTS, [curve(at)] * 2)
            for size, at in ((1, 0.0), (2, 0.5), (4, 1.0), (8, 4.0))}  # fmt: skip
    found = rate_drift(best)
    np.testing.assert_allclose(known(found.octaves_per_doubling), 0.5)
    assert found.span is None
    assert found.steady == "open"


@pytest.mark.parametrize("at", [-6.0, -2.2, -1.0, 1.9])
def test_excess_loss_matches_parabola(at):
    """The logarithm of the loss is a parabola, so its height at each rate is known."""
    found = excess_loss(EXPONENTS, curve(-1.3), at)
    np.testing.assert_allclose(known(found), 0.3 * (at + 1.3) ** 2)
    assert excess_loss(EXPONENTS, curve(-9.0), at) is None


@pytest.mark.parametrize("losses", [[None, None, 0.5, None], [None, 0.7, 0.5, 0.7]], ids=str)
def test_lowest_loss_beside_diverged_rates_is_inside_the_grid(losses):
    found = best_rate([-4, -3, -2, -1], [losses])
    assert (found.log2_rate, found.edge) == (pytest.approx(-2), "")
    assert excess_loss([-4, -3, -2, -1], losses, -2.0) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_excess_loss_is_that_of_the_grid_and_never_negative(seed):
    """Of two parabolas through neighbours on the grid the other may have the lower minimum."""
    rng = np.random.default_rng(seed)
    grid = np.cumsum(rng.uniform(0.3, 2, 7)) - 10
    losses = np.exp(rng.normal(0, 2, 7))
    losses[3] = losses.min() / 2
    found = [excess_loss(grid, losses, at) for at in np.linspace(grid[0], grid[-1], 200)]
    assert min(map(known, found)) >= 0
    at_grid = np.array([known(excess_loss(grid, losses, at)) for at in grid])
    np.testing.assert_allclose(at_grid - at_grid[3], np.log(losses / losses[3]), atol=1e-9)


RATES = (2.0 ** np.array(EXPONENTS)).tolist()
THREE = [[0.9, 0.5, 0.7]] * 2
REFUSED = {
    "transposed": (EXPONENTS, np.transpose([curve(0.0)] * 3), r"9 rates; got shape \(3,\)"),
    "a short curve": (EXPONENTS, [curve(0.0), curve(0.0)[:-1]], r"\[1\] must .* got shape \(8,\)"),
    "a long curve": (EXPONENTS, [[*curve(0.0), 1.0]], r"9 rates; got shape \(10,\)"),
    "one curve": (EXPONENTS, curve(0.0), "9 rates; got the number"),
    "no curve": (EXPONENTS, [], "a curve for each seed; got none"),
    "curves in curves": (EXPONENTS, [[curve(0.0)]], r"got shape \(1, 9\)"),
    "logarithms of losses": (EXPONENTS, [np.log(curve(0.0)).tolist()], "must be positive.*got -1"),
    "a loss of zero": ([-3, -2, -1], [[0.1, 0.0, 0.1]], "must be positive"),
    "rates": (RATES, [curve(0.0)], "look like the rates: give np.log2"),
    "rates by thirds of a decade": ([0.01, 0.03, 0.1], THREE, "look like the rates"),
    "rates by a factor of 10": ([0.001, 0.01, 0.1], THREE, "look like the rates"),
    "rates evenly spaced": ([0.1, 0.2, 0.3], THREE, "look like the rates"),
    "rates above 1": ([1.0, 3.0, 10.0], THREE, "look like the rates"),
    "two rates": ([0.001, 0.01], [[0.9, 0.5]], "look like the rates"),
    "logarithms of falling rates": ([-1, -2, -3], THREE, "ascending"),
    "a rate twice": ([-3, -2, -2], THREE, "ascending"),
    "a single rate": ([-3], [[0.5]], "two numbers or more"),
    "a rate of zero": (np.array([-np.inf, -2, -1]), THREE, "ascending"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sweeps_that_do_not_fit_are_refused(name):
    grid, losses, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        best_rate(grid, losses)
    if "curve" not in name and name != "transposed":
        with pytest.raises(ValueError, match=message):
            excess_loss(grid, losses[0], -1.0)


@pytest.mark.parametrize("grid", [[0, 1, 2], [1, 2, 3], [0.5, 1.0, 1.5], [-1, 0.5, 3], [0, 0.1, 1]])
def test_grids_of_large_rates_are_accepted(grid):
    assert best_rate(grid, np.array(THREE)) == best_rate(grid, THREE)
    assert best_rate(grid, THREE).edge == ""


def test_price_of_rate_outside_grid_is_refused():
    for at in (-6.5, 2.1, np.nan, 1e-300 - 7):
        with pytest.raises(ValueError, match=r"excess_loss\(at\) must be a finite number in"):
            excess_loss(EXPONENTS, curve(0.0), at)


def test_feature_changes_match_numpy():
    network, changes = mlp(3, 4, 5, 2), jax.jit(feature_changes, static_argnums=0)
    before = network.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    still = changes(network, before, before, x)
    assert all(float(change) == 0 for change in still.values())
    assert list(still) == ["1", "2"]
    after = (2 * before[0], before[1], before[2])
    moved = changes(network, before, after, x)
    hidden = np.asarray(x) @ np.asarray(before[0]).T
    np.testing.assert_allclose(moved["1"], np.sqrt(np.mean(hidden**2)), rtol=1e-5)
    out = np.maximum(hidden, 0) @ np.asarray(before[2]).T
    np.testing.assert_allclose(moved["2"], np.sqrt(np.mean(out**2)), rtol=1e-5)
    assert list(changes(Linear(2, 4), jnp.eye(2, 4), jnp.eye(2, 4), x)) == ["1"]
