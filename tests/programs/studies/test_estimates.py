"""Intervals of means, differences and slopes, against SciPy."""

import numpy as np
import pytest
import scipy.stats

from studies import estimates


def known(value):
    """Return `value` after asserting that it is not None."""
    assert value is not None
    return value


def test_intervals_match_scipy():
    rng = np.random.default_rng(0)
    a, b, x = rng.normal(size=(3, 6))
    for ours, theirs in (
        (estimates.mean_estimate(a), scipy.stats.ttest_1samp(a, 0).confidence_interval()),
        (estimates.difference_estimate(a, b), scipy.stats.ttest_ind(a, b).confidence_interval()),
    ):
        np.testing.assert_allclose(known(ours.interval), theirs, rtol=1e-9)
    line = np.asarray(scipy.stats.linregress(x, a))
    half = scipy.stats.t.ppf(0.975, 4) * line[4]
    found = estimates.slope_estimate(x, a)
    np.testing.assert_allclose(found.value, line[0])
    np.testing.assert_allclose(known(found.interval), [line[0] - half, line[0] + half], rtol=1e-9)
    np.testing.assert_allclose(known(estimates.half_width(found.interval)), half, rtol=1e-9)


def test_too_few_values_have_no_interval():
    assert estimates.mean_estimate([1.0]) == (1.0, None)
    assert estimates.difference_estimate([3.0], [1.0]) == (2.0, None)
    assert estimates.slope_estimate([0.0, 1.0], [1.0, 3.0]) == (2.0, None)
    assert estimates.half_width(None) is estimates.half_width([1.0, None]) is None
    with pytest.raises(ValueError, match="values must not be empty"):
        estimates.mean_estimate([])


def test_rate_is_chosen_by_other_seeds():
    losses = np.random.default_rng(2).normal(size=(4, 7))
    found, _ = estimates.at_best_rate(losses)
    for seed in range(4):
        others = np.delete(losses, seed, axis=0).mean(axis=0)
        assert found[seed] == losses[seed, others.argmin()]


def test_diverged_rate_is_never_chosen():
    losses = np.array([[np.nan, 3.0, 2.0], [0.1, 3.0, 2.0], [0.1, 3.0, 2.0]])
    found, at = estimates.at_best_rate(losses)
    assert at == 2
    assert np.isfinite(found).all()


def test_estimate_needs_every_seed():
    assert (
        estimates.estimate([0.5, None, 0.7])
        == estimates.estimate([])
        == {"mean": None, "interval": None}
    )
    assert estimates.estimate([0.5]) == {"mean": 0.5, "interval": None}
