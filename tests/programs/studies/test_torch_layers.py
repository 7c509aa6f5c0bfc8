"""Orthogonal layers against PyTorch's: tuning, summary, timing and the missing environment."""

import numpy as np
import pytest

from studies.torch_layers import OURS, TorchLayers, tune

TINY = TorchLayers(methods=(OURS,), seeds=(1, 2), steps=3, rounds=1)


def test_grid_grows_until_best_is_inside():
    def losses(pairs):
        return [np.nan if body > 8 else (body - 7) ** 2 + (head + 2) ** 2 for body, head in pairs]

    found = tune(losses, [0, 1, 2, 3, 4], [-1, 0, 1])
    assert min(found, key=lambda pair: found[pair]) == (7, -2)
    assert {(body, head) for body in (6, 7, 8) for head in (-3, -2, -1)} <= set(found)
    assert len(found) < 15 + 8 * 4  # no row or column of the whole grid is added


def test_summary_of_known_rows():
    tuning = [(body, head, 1.0 + abs(body) + (head > 0)) for body in (-2, 0, 1) for head in (0, 1)]
    row = {"method": OURS, "tuning": tuning, "loss": [1, 3], "accuracy": [0.9, 1], "distance": 0.0}
    times = [{"round": k, "milliseconds": {OURS: {"step": k, "set_up": 9}}} for k in (1, 2, 6)]
    found = TINY.summarise([row, *times])[OURS]
    assert (found["log2_rates"], found["octave_off"], found["step"]) == ((0, 0), 3.0, 2)
    assert found["loss"]["mean"] == 2
    assert found["loss_beyond"]["interval"] == (0, 0)


def test_round_times_steps_of_all_methods():
    found = TINY.run({"round": 0})["milliseconds"][OURS]
    assert found["set_up"] > found["step"] > 0


def test_missing_environment_says_what_to_install(tmp_path):
    study = TorchLayers(python=tmp_path / "python")
    with pytest.raises(ValueError, match="pip install torch geotorch geoopt"):
        study.run({"method": "geoopt"})
