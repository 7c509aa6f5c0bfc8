"""Gaps of Stiefel solvers along a run: the optimum, a control, and warm starts."""

import numpy as np

from manifoldmuon.manifolds.solvers import ClosedForm
from studies.baselines import ADMM
from studies.solver_gaps import solver_gaps
from studies.solvers import NoProjection


def problem(m: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a point and a gradient with singular values of different sizes, in float32."""
    rng = np.random.default_rng(seed)
    point = np.linalg.qr(rng.standard_normal((m, n)))[0]
    grad = rng.standard_normal((m, n)) * np.geomspace(1, 0.05, n)
    return point.astype(np.float32), grad.astype(np.float32)


WINDOWS = [problem(6, 4, seed) for seed in (0, 1)]
"""One problem each, which comes three times."""

POINTS, GRADS = (np.stack([np.stack(x)] * 3) for x in zip(*WINDOWS, strict=True))


def test_optimum_has_no_gap_and_control_has():
    exact = solver_gaps(ClosedForm(), POINTS, GRADS)
    assert max(exact.cold + exact.warm) < 1e-3
    control = solver_gaps(NoProjection(), POINTS, GRADS)
    assert min(control.cold) > 0.02
    assert control.cold == control.warm  # it has no memory


def test_residual_of_no_projection_matches_svd():
    """The residual is `||W^T A + A^T W||_F / n` with the polar factor A."""
    found = solver_gaps(NoProjection(), POINTS, GRADS)
    for residual, (point, grad) in zip(np.asarray(found.residual_cold), WINDOWS, strict=True):
        u, _, vt = np.linalg.svd(np.float64(grad), full_matrices=False)
        inner = np.float64(point).T @ u @ vt
        np.testing.assert_allclose(residual, np.linalg.norm(inner + inner.T) / 4, rtol=1e-3)


def test_warm_starts_accumulate_iterations():
    """The same problem comes three times, so iterations add up."""
    found = solver_gaps(ADMM(steps=3), POINTS, GRADS)
    assert all(warm < cold / 2 for warm, cold in zip(found.warm, found.cold, strict=True))
