"""Named schedules keep their documented accuracy; Polar Express is optimal and as published."""

import numpy as np
import pytest
from scipy.optimize import linprog

from manifoldmuon import linalg

# arXiv:2505.16932, the coefficients for [1e-3, 1], with the cushion of the published code.
PUBLISHED = [(8.28721, -23.59589, 17.30039), (4.10706, -2.94785, 0.54484),
             (3.94869, -2.90890, 0.55182), (3.31842, -2.48849, 0.51005),
             (2.30065, -1.66890, 0.41881), (1.89130, -1.26800, 0.37681),
             (1.87500, -1.25000, 0.37500)]  # fmt: skip


def test_published_coefficients_to_four_digits():
    designed = linalg.PolarExpress(1e-3, steps=9, cushion=0.02407327424182761)
    np.testing.assert_allclose(designed.coefficients[:7], PUBLISHED, rtol=1e-4)
    np.testing.assert_allclose(designed.coefficients[7:], [(1.875, -1.25, 0.375)] * 2, rtol=1e-6)


@pytest.mark.parametrize("lower", [1e-3, 0.1, 0.6])
@pytest.mark.parametrize("degree", [3, 5, 7, 9, 13])
def test_single_step_is_optimal(degree, lower):
    """Compare with the linear programme: minimise E subject to |1 - f| <= E on a grid."""
    x = np.linspace(lower, 1, 4001)
    basis = x[:, None] ** np.arange(1, degree + 1, 2)
    ones = np.ones((len(x), 1))
    sides = np.block([[basis, -ones], [-basis, -ones]])
    cost, limits = np.eye(basis.shape[1] + 1)[-1], np.vstack([ones, -ones])
    best = linprog(cost, sides, limits, bounds=(None, None)).fun
    error = np.abs(1 - linalg.PolarExpress(lower, degree, 1).apply(x)).max()
    np.testing.assert_allclose(error, best, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("cushion", [0.0, 0.05])
@pytest.mark.parametrize("safety", [1.0, 1.01])
@pytest.mark.parametrize("lower", [1e-7, 1e-3, 0.9, 1 - 1e-9])
@pytest.mark.parametrize("degree", [3, 5, 7, 9])
def test_whole_range_converges_to_one(degree, lower, safety, cushion):
    schedule = linalg.PolarExpress(lower, degree, safety=safety, cushion=cushion)
    values = schedule.apply(np.concatenate([np.geomspace(lower, 1, 20001), [0.0]]))
    limit = 1e-7 if safety == 1.0 else 1e-3
    assert np.abs(1 - values[:-1]).max() <= limit
    assert values[-1] == 0


def test_safety_keeps_rounding_from_diverging():
    """Each step starts from a value 0.05 % above its interval."""

    def disturbed(safety, steps):
        x = np.array(1.0)
        for step in linalg.PolarExpress(1e-6, steps=14, safety=safety).coefficients[:steps]:
            x = linalg.FixedSchedule((step,)).apply(x * 1.0005)
        return x

    assert disturbed(1.0, 6) > 5
    np.testing.assert_allclose(disturbed(1.001, 14), 1, atol=1e-3)


def test_named_schedules_reach_documented_accuracy():
    small, large = np.geomspace(1e-3, 0.05, 101), np.linspace(0.05, 1, 1001)
    for schedule, x, error in (
        (linalg.CUBIC, large, 1e-12),
        (linalg.QUINTIC, large, 1e-2),
        (linalg.QUINTIC.with_steps(40), large, 1e-6),
        (linalg.MODULA_SIX_STEP, large, 0.2),
        (linalg.POLAR_EXPRESS, np.append(small, large), 1e-3),
    ):
        np.testing.assert_allclose(schedule.apply(x), 1, atol=error)
    assert linalg.MUON.with_steps(1).apply(1.0) == pytest.approx(0.701, abs=1e-12)
    assert linalg.MUON.length == 5
    assert 0.65 < linalg.MUON.apply(large).min() < linalg.MUON.apply(large).max() < 1.25


def test_tail_extends_head_to_steps():
    schedule = linalg.FixedSchedule(((2.0, -1.0),), tail=(1.5, -0.5), steps=3)
    assert schedule.coefficients == ((2.0, -1.0), (1.5, -0.5), (1.5, -0.5))
    assert schedule.with_steps(1).coefficients == ((2.0, -1.0),)
    x = 0.3
    for a, b in schedule.coefficients:
        x = a * x + b * x**3
    assert schedule.apply(0.3) == pytest.approx(x, rel=1e-14)
