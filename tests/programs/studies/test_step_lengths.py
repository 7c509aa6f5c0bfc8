"""Automatic step lengths in small runs: records, tables and command lines."""

import json

import numpy as np
import pytest

from studies.step_lengths import agd


@pytest.mark.slow
def test_agd_and_adam_learn(tmp_path, capsys):
    out = tmp_path / "agd.json"
    argv = ["--width", "16", "--depths", "2", "--epochs", "6", "--learning-rates", "0.001", "0.01",
            "--out", str(out)]  # fmt: skip
    assert agd.main(argv) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [run["method"] for run in record["runs"]] == ["agd", "adam 0.001", "adam 0.01"]
    starts = {run["train_loss"][0] for run in record["runs"]}
    assert len(starts) == 1
    for run in record["runs"]:
        assert run["train_loss"][-1] < 0.8 * run["train_loss"][0]
        assert len(run["train_loss"]) == 7
    first, *others = record["runs"]
    assert len(first["eta"]) == 6
    assert all(0 < eta < np.log(2) for eta in first["eta"])  # G < 2, by lemma 7 of the paper
    assert first["test_accuracy"][-1] > 0.5
    best = max(others, key=lambda run: run["test_accuracy"][-1])["method"]
    assert record["best_adam"] == {"2": best}
    assert best in capsys.readouterr().out
    assert out.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("program", "argv", "reason"),
    [
        (agd, ["--depths", "0"], "'0' is not a whole number, 1 or more"),
        (agd, ["--depths", "2", "2"], "argument --depths: 2 given more than once"),
        (agd, ["--batch-size", "5000"], "there are only 1438 training images"),
        (agd, ["--data-dir", "."], "the digits ship inside scikit-learn"),
        (agd, ["--gain", "-1"], "'-1' is not a positive number"),
        (agd, ["--out", "old.json"], "old.json exists; pass --overwrite"),
    ],
)
def test_invalid_arguments_give_one_line_error(
    program, argv, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    with pytest.raises(SystemExit) as stop:
        program.main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert reason in err
