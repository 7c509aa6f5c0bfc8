"""The designer of schedules: independent errors, the published design, and counted costs."""

import numpy as np
import pytest

from manifoldmuon.linalg import CUBIC, MODULA_SIX_STEP, MUON, QUINTIC, FixedSchedule
from studies import run_study
from studies.newton_schulz import DESIGN, NewtonSchulzDesigner, matrix_error, polynomial_error

pytestmark = pytest.mark.slow


def test_design_beats_named_schedules():
    """The design is the best composition of five quintics on its interval."""
    record = run_study(NewtonSchulzDesigner(lower=1e-3, steps=5, size=24, seeds=(0,)))
    errors = {row["schedule"]: row["error_after"] for row in record["rows"]}
    assert all(errors[name][4] > errors[DESIGN][4] for name in ("quintic", "Muon", "cubic"))
    assert np.all(np.diff(errors[DESIGN]) < 0)


def test_matrix_error_matches_polynomial_error():
    """In float64 rounding is negligible; the errors differ by the spacing of the values."""
    for schedule in (MUON, MODULA_SIX_STEP, FixedSchedule(tail=(1.5, -0.5), steps=4)):
        values = np.geomspace(0.05, 1, 24)
        exact = np.abs(schedule.apply(values) - 1).max()
        measured = matrix_error(schedule, 0.05, "float64", 24, 0)
        np.testing.assert_allclose(measured, exact, rtol=1e-9)
        assert measured <= polynomial_error(schedule, 0.05) * (1 + 1e-9)


def test_lower_precision_has_larger_errors():
    errors = [matrix_error(CUBIC, 0.1, d, 24, 0) for d in ("float64", "float32", "bfloat16")]
    assert errors[0] < 1e-13 < errors[1] < 1e-5 < 1e-4 < errors[2] < 0.05
    escaping = FixedSchedule(tail=(3.0, 1.0), steps=30)
    assert matrix_error(escaping, 0.1, "float32", 24, 0) == np.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_number_of_steps_suits_dtype(dtype):
    """The design takes exactly a step more than the dtype's resolution needs."""
    eps = {"float32": 2.0**-23, "bfloat16": 2.0**-7}[dtype]
    design = NewtonSchulzDesigner(lower=1e-2, dtype=dtype).schedule()
    errors = [polynomial_error(design.with_steps(k), 1e-2) for k in range(1, design.length + 1)]
    assert errors[-2] <= eps < errors[-3]


def test_schedule_cost_counts_products():
    """`X p(X^T X)` takes the Gram matrix, its powers, and the last product."""
    assert CUBIC.with_steps(1).products == 2
    assert QUINTIC.with_steps(1).products == 3
    assert MUON.products == 15
    assert FixedSchedule(((2.0, -1.0, 0.5, -0.1, 0.01),)).products == 4
