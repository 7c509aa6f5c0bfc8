"""Every framework's program, for a few steps: losses fall, weights stay on their manifolds."""

import importlib
import math

import pytest

# Steps, and the loss that the last ten are below in the mean. Chance is ln 10 = 2.30, for the
# pixels ln 17 = 2.83.
PROGRAMS = {
    "nnx": (50, 0.6),
    "linen": (30, 1.9),
    "equinox": (50, 0.6),
    "haiku": (50, 1.6),
    "plain": (60, 0.2),
}


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains(name):
    steps, below = PROGRAMS[name]
    trained = importlib.import_module(f"examples.frameworks.{name}").train(steps)
    assert len(trained.losses) == steps
    assert math.fsum(trained.losses[-10:]) / 10 < below < trained.losses[0]
    assert set(trained.distances) == {row.path for row in trained.table.rows if row.manifold}
    # One rounding of bfloat16 entries, or of float32 ones.
    assert max(map(float, trained.distances.values())) < (0.01 if name == "equinox" else 1e-5)
