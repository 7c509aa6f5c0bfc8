"""Every framework's program, for a few steps: losses fall, weights stay on their manifolds."""

import importlib
import math

import pytest

# Steps, and a bound on the mean loss of the last ten. Chance is ln 10 = 2.30, and ln 17 = 2.83 for
# the pixels.
PROGRAMS = {
    "nnx": (50, 0.6),
    "linen": (30, 1.9),
    "equinox": (50, 0.6),
    "plain": (60, 0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_framework_program_trains_on_manifold(name):
    steps, below = PROGRAMS[name]
    trained = importlib.import_module(f"examples.frameworks.{name}").train(steps)
    assert len(trained.losses) == steps
    assert math.fsum(trained.losses[-10:]) / 10 < below < trained.losses[0]
    assert set(trained.distances) == {row.path for row in trained.table.rows if row.manifold}
    # A single rounding of the entries, in bfloat16 for equinox and in float32 for the others.
    assert max(map(float, trained.distances.values())) < (0.01 if name == "equinox" else 1e-5)
