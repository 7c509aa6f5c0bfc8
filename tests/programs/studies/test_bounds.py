"""The study of bounds, in a short run: attacks do not exceed the bounds."""

import json

import pytest

from manifoldmuon.modules import mlp
from studies import bounds


@pytest.mark.slow
def test_attacks_stay_below_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "STEPS", 50)
    monkeypatch.setattr(bounds, "RATE", 1.0)
    monkeypatch.setattr(bounds, "RADII", (0.02,))
    monkeypatch.setattr(bounds, "NETWORKS", {"small": 10.0 * mlp(10, 64, 16, 2)})
    assert bounds.main(["--out", str(tmp_path / "record.json")]) == 0
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    for row in record["networks"].values():
        assert row["test accuracy"] > 0.3  # chance is 0.1
        for kind in ("input slope", "weight slope"):
            assert 0.2 * row[kind]["certified at the weights"] < row[kind]["found"]
            assert row[kind]["found"] <= row[kind]["certified at the weights"] * (1 + 1e-4)
        for line in row["accuracy"]:
            assert line["certified"] <= line["attacked"] <= row["test accuracy"]
        # Flat space does not constrain the weights, so there is no bound without their values.
        assert row["input slope"]["certified on the sets"] is None
