"""Gradients that the main job records for benchmarks of solvers."""

import numpy as np
import pytest

from studies.digits.gradients import record_gradients, save_gradients
from studies.digits.settings import Settings

# Without hidden layers, the only matrix is wide.
TINY = Settings(widths=(), batch_size=64, preset="fast")


def test_recorded_points_and_gradients_are_saved(tmp_path):
    recorded = record_gradients(6, 2, settings=TINY)
    assert [name for name, _, _ in recorded] == [f"layer 1, step {step}" for step in (0, 3, 5)]
    for _, point, gradient in recorded:
        assert point.shape == gradient.shape == (64, 10)  # tall, as solvers expect
        np.testing.assert_allclose(point.T @ point, np.eye(10), atol=1e-5)
        assert np.abs(gradient).max() > 0
    first, later = recorded[0][1], recorded[1][1]
    assert np.abs(first - later).max() > 1e-3
    save_gradients(tmp_path / "g.npz", recorded)
    with np.load(tmp_path / "g.npz") as file:
        assert len(file) == 2 * len(recorded)
        np.testing.assert_array_equal(file["layer 1, step 3/gradient"], recorded[1][2])
        np.testing.assert_array_equal(file["layer 1, step 3/weight"], recorded[1][1])


@pytest.mark.parametrize("at", [[6], [-1], []])
def test_recording_missing_steps_raises(at):
    with pytest.raises(ValueError, match="must lie between 0 and 5"):
        record_gradients(6, 2, at=at, settings=TINY)
