"""Zolotarev's functions against SciPy and the theory of best approximation; inverses."""

import numpy as np
import pytest
import scipy.special

from manifoldmuon.manifolds.solvers._rational import inverse, zolotarev
from tests.compiled import ask


@pytest.mark.parametrize(("poles", "lower"), [(1, 0.5), (2, 2e-3), (4, 1e-2), (8, 3e-3)])
def test_zolotarev_is_optimal(poles, lower):
    found = zolotarev(poles, lower)
    x = np.geomspace(lower, 1, 200001)
    values = x * (found.weights / (x[:, None] ** 2 + found.shifts)).sum(axis=1)
    assert values.max() == pytest.approx(1, abs=1e-8)
    assert 1 - values.min() == pytest.approx(found.error, rel=1e-3)
    # Optimal by Chebyshev's criterion: the error attains its maximum, with alternating signs, once
    # more than there are free parameters.
    middle = 1 - found.error / 2
    high, low = np.abs(values - 1) < 1e-3 * found.error, values < 1 - (1 - 1e-3) * found.error
    signs = np.sign(values - middle)[high | low]
    assert 1 + np.count_nonzero(np.diff(signs)) == 2 * poles + 1


@pytest.mark.parametrize(("poles", "lower"), [(1, 0.5), (3, 1e-5), (8, 3e-3)])
def test_zolotarev_poles_match_elliptic_functions(poles, lower):
    quarter = scipy.special.ellipkm1(lower**2)
    u = np.arange(1, 2 * poles, 2) * quarter / (2 * poles)
    sn, cn, _, _ = scipy.special.ellipj(u, 1 - lower**2)
    np.testing.assert_allclose(zolotarev(poles, lower).shifts, (lower * sn / cn) ** 2, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 16, 64, 101, 192])
def test_inverse_matches_numpy(n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((2, n, n)) / np.sqrt(n)
    matrices = x @ x.mT + 1e-3 * np.eye(n) + 0.5 * (x - x.mT)
    found, exact = np.float64(ask(inverse, np.float32(matrices))), np.linalg.inv(matrices)
    size = np.linalg.norm(exact, 2, axis=(1, 2)) * np.linalg.cond(matrices)
    assert np.all(np.linalg.norm(found - exact, 2, axis=(1, 2)) < 2e-6 * size)


def test_inverse_without_positive_pivots_is_nan():
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((80, 80)))[0]
    values = np.linspace(0.1, 1, 80) * np.where(np.arange(80) == 0, [[1], [-1]], 1)
    good, bad = ask(inverse, np.float32(turned * values[:, None] @ turned.T))
    assert np.isfinite(good).all()
    assert np.isnan(bad).any()
