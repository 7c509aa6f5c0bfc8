"""Automatic step lengths in small: their records, tables and command lines."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from studies.step_lengths import agd, free_steps, free_training
from studies.step_lengths.free_training import FreeRun


@pytest.mark.slow
def test_automatic_gradient_descent_learns_beside_adam(tmp_path, capsys):
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


def test_images_and_targets_have_the_paper_s_sizes():
    data = free_training.digits(0)
    np.testing.assert_allclose(np.sum(data.train_x**2, axis=1), data.train_x.shape[1], rtol=1e-4)
    net = free_training.mlp(10, 64, 8, 2)
    zero = jax.tree.map(jnp.zeros_like, net.init(jax.random.key(0)))
    # Of the output zero the loss is half the squared root mean square of a target: one half.
    images, labels = map(jnp.asarray, data[:2])
    assert float(free_training.square_loss(net, zero, images, labels)) == pytest.approx(0.5)


def test_the_table_marks_the_best_rate_and_shows_its_neighbours():
    def runs(loss):
        return [FreeRun(loss, 0.9, np.full(30, 0.5)), FreeRun(loss, 0.8, np.full(30, 0.25))]

    losses = {"rate 0.1": 0.5, "rate 0.2": 0.3, "rate 0.4": 0.2, "rate 0.8": np.nan}
    found = {name: runs(loss) for name, loss in losses.items()} | {"search": runs(0.25)}
    assert free_steps.best(found) == "rate 0.4"
    text = free_steps.table("title", found).splitlines()
    assert [line.split("  ")[0].strip() for line in text[2:]] == [
        "rate 0.2", "rate 0.4 (best)", "rate 0.8", "search"]  # fmt: skip
    assert "85.00 ± 5.00 %" in text[-1]
    assert text[-1].endswith("0.375  0.375  0.375")


def test_free_steps_train(monkeypatch, tmp_path):
    monkeypatch.setattr(free_training, "RATES", (0.25,))
    monkeypatch.setitem(free_training.NETWORKS, "mlp", free_training.mlp(10, 64, 8, 2))
    keep = ("smoothness", "rate 0.25")
    for name in ("free_links", "tuned_links"):
        make = getattr(free_steps, name)
        monkeypatch.setattr(
            free_steps, name, lambda x, make=make: {k: v for k, v in make(x).items() if k in keep}
        )
    out = tmp_path / "free.json"
    argv = ["--networks", "mlp", "--steps", "20", "--seeds", "0", "--out", str(out)]
    assert free_steps.main(argv) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["best"] == {"mlp": "rate 0.25"}
    assert list(record["runs"]["mlp"]) == list(keep)
    for (run,) in record["runs"]["mlp"].values():
        assert run["train_loss"] < 0.45  # 0.5 is where it begins
    smooth = record["runs"]["mlp"]["smoothness"][0]["learning_rate"]
    assert len(smooth) == 20
    assert all(rate > 0 for rate in smooth)


@pytest.mark.parametrize(
    ("program", "argv", "reason"),
    [
        (agd, ["--depths", "0"], "'0' is not a whole number, 1 or more"),
        (agd, ["--depths", "2", "2"], "argument --depths: 2 given more than once"),
        (agd, ["--batch-size", "5000"], "there are only 1438 training images"),
        (agd, ["--data-dir", "."], "the digits ship inside scikit-learn"),
        (agd, ["--gain", "-1"], "'-1' is not a positive number"),
        (agd, ["--out", "old.json"], "old.json exists; pass --overwrite"),
        (free_steps, ["--momentum", "1"], "--momentum: 1 is not below 1"),
        (free_steps, ["--seeds", "3", "3"], "--seeds: 3 given more than once"),
        (free_steps, ["--networks", "gpt"], "invalid choice: 'gpt'"),
        (free_steps, ["--batch-size", "2000"], "more than the 1438 training images"),
    ],
)
def test_a_wrong_argument_is_one_line(program, argv, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    with pytest.raises(SystemExit) as stop:
        program.main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert reason in err
