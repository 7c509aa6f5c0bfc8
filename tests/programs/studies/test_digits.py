"""The main job, end to end, in a short run: its output, files and results."""

import json
import re

import matplotlib.image
import numpy as np
import pytest

from studies.digits.__main__ import main
from studies.digits.loop import chunk_lengths
from studies.digits.methods import METHODS
from studies.digits.settings import Settings

# The rates are tuned for 500 steps; with its tuned rate, Muon would not learn in this few.
RATES = {name: method.learning_rate for name, method in METHODS.items()} | {"muon": 0.03}
TINY = ["--widths", "24", "--steps", "40", "--batch-size", "64", "--seeds", "0", "3"]
# Two wide layers; the targets of all singular values are 1.
LAYERS = [64, 24, 10]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Run the job; return the record, the folder and the printed text."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr(
            "builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))
        )
        assert main([*TINY, "--learning-rate", "muon=0.03", "--out", str(folder)]) == 0
    record = json.loads((folder / "digits-001.json").read_text(encoding="utf-8"))
    return record, folder, "\n".join(printed)


def test_every_optimizer_learns(job):
    record, _, _ = job
    assert list(record["runs"]) == list(METHODS)
    for runs in record["runs"].values():
        for run in runs:
            assert run["train_loss"][-1] < run["train_loss"][0] / 3
            assert run["test_accuracy"][-1] > 0.5  # chance is 0.1


def test_optimizers_start_from_same_weights(job):
    record, _, _ = job
    for seed in (0, 1):
        starts = {tuple(run[k][0] for k in ("train_loss", "test_accuracy", "largest", "smallest"))
                  for run in (runs[seed] for runs in record["runs"].values())}  # fmt: skip
        assert len(starts) == 1
    first, second = record["runs"]["adamw"]
    assert first["train_loss"][0] != second["train_loss"][0]


def test_weights_stay_on_manifolds(job):
    record, _, _ = job
    for run in record["runs"]["stiefel"]:
        assert len(run["distance"]) == len(run["step"]) - 1
        assert max(run["distance"]) <= 1e-5
        # Checked independently of the library's monitor, by float64 singular values.
        assert max(run["largest"]) <= 1 + 1e-5
        assert min(run["smallest"]) >= 1 - 1e-5
        assert 0 <= max(run["gap"]) <= 3e-2
        assert 0 <= max(run["residual"]) <= 1e-3
    for run in record["runs"]["sphere"]:
        assert max(run["distance"]) <= 1e-5
        np.testing.assert_allclose(run["frobenius_norms"], [24**0.5, 10**0.5], rtol=1e-5)
    for name in ("adamw", "muon"):  # free weights have left
        assert all(max(run["largest"]) > 1 + 1e-3 for run in record["runs"][name])
        assert all(run["distance"] == [] for run in record["runs"][name])


def test_summary_follows_from_runs(job):
    record, _, _ = job
    assert record["layers"] == LAYERS
    for name, row in record["summary"].items():
        runs = record["runs"][name]
        finals = [100 * run["test_accuracy"][-1] for run in runs]
        assert row["test_accuracy"]["mean"] == pytest.approx(np.mean(finals))
        assert row["test_accuracy"]["error"] == pytest.approx(abs(finals[0] - finals[1]) / 2)
        products = [4 * np.prod(run["spectral_norms"]) for run in runs]
        assert row["lipschitz"]["mean"] == pytest.approx(np.mean(products))
        assert row["milliseconds"] > 0
    assert record["summary"]["stiefel"]["lipschitz"]["mean"] == pytest.approx(4, rel=1e-5)
    pairs = zip(record["runs"]["muon"], record["runs"]["adamw"], strict=True)
    leads = [100 * (a["test_accuracy"][-1] - b["test_accuracy"][-1]) for a, b in pairs]
    assert record["lead_over_adamw"]["muon"]["mean"] == pytest.approx(np.mean(leads))


def test_record_contains_settings(job):
    record, _, _ = job
    settings = record["settings"]
    assert settings["steps"] == 40
    assert settings["seeds"] == [0, 3]
    assert settings["learning_rates"] == RATES
    assert {"jax", "optax", "python"} <= set(record["environment"])
    assert str(job[1]) not in json.dumps(record)  # no user's folders


def test_table_shows_every_optimizer(job):
    record, folder, printed = job
    lines = printed.splitlines()
    for column in ("test accuracy", "train loss", "distance", "residual", "gap", "ms/step",
                   "Lipschitz"):  # fmt: skip
        assert any(column in line for line in lines[:3])
    for name, method in METHODS.items():
        [line] = [line for line in lines[:9] if line.startswith(method.label)]
        cells = re.split(r"\s{2,}", line)
        assert len(cells) == 8
        assert cells[1].startswith(f"{record['summary'][name]['test_accuracy']['mean']:.2f} ± ")
        has_distance = record["summary"][name]["distance"] is not None
        assert (cells[3] != "-") is has_distance is (name in ("sphere", "stiefel"))
    assert lines[-1] == f"written: {folder / 'digits-001.json'} {folder / 'digits-001.png'}"
    assert max(map(len, lines[:-1])) <= 100


def test_picture_has_four_panels(job):
    _, folder, _ = job
    image = matplotlib.image.imread(folder / "digits-001.png")
    height, width = image.shape[:2]
    assert height > 800
    assert width > 1200
    for part in (image[:, : width // 2], image[:, width // 2 :]):
        for panel in (part[: height // 2], part[height // 2 :]):
            assert panel[..., :3].std() > 0.05  # not blank


def test_second_run_repeats_first(job, capsys):
    record, folder, _ = job
    argv = [*TINY, "--out", str(folder), "--optimizer", "sphere"]
    before = (folder / "digits-001.json").read_bytes()
    assert main(argv) == 0
    assert (folder / "digits-001.json").read_bytes() == before
    again = json.loads((folder / "digits-002.json").read_text(encoding="utf-8"))
    for first, second in zip(record["runs"]["sphere"], again["runs"]["sphere"], strict=True):
        assert first["train_loss"] == second["train_loss"]
        assert first["spectral_norms"] == second["spectral_norms"]
    assert again["lead_over_adamw"] == {}


def test_options_reach_training(tmp_path, capsys):
    argv = ["--widths", "16", "--steps", "7", "--batch-size", "32", "--seed", "5",
            "--optimizers", "stiefel", "--learning-rate", "0.03", "--preset", "fast",
            "--multiplier", "8", "--name", "mine", "--out", str(tmp_path / "new"),
            "--record-gradients", str(tmp_path / "g.npz")]  # fmt: skip
    assert main(argv) == 0
    record = json.loads((tmp_path / "new" / "mine.json").read_text(encoding="utf-8"))
    assert record["layers"] == [64, 16, 10]
    assert record["settings"]["learning_rates"] == {"stiefel": 0.03}
    assert record["settings"]["preset"] == "fast"
    assert record["summary"]["stiefel"]["lipschitz"]["mean"] == pytest.approx(8, rel=1e-5)
    assert record["summary"]["stiefel"]["test_accuracy"]["error"] is None
    assert [run["seed"] for run in record["runs"]["stiefel"]] == [5]
    # The loss curve ends at the last step of training, also for 7 steps.
    assert record["runs"]["stiefel"][0]["step"][-1] == 7
    with np.load(tmp_path / "g.npz") as recorded:
        names = sorted({key.split("/")[0] for key in recorded})
    assert names == [f"layer {i}, step {s}" for i in (1, 2) for s in (0, 3, 6)]
    assert (tmp_path / "new" / "mine.png").stat().st_size > 10_000
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert re.fullmatch(
        r"error: .*mine.json exists.*\n", capsys.readouterr().err.splitlines(True)[-1]
    )


def test_diverging_run_is_reported(tmp_path, capsys):
    argv = [*TINY, "--optimizer", "adamw", "--learning-rate", "1e38", "--out", str(tmp_path)]
    assert main(argv) == 0
    assert "nan" in capsys.readouterr().out
    record = json.loads((tmp_path / "digits-001.json").read_text(encoding="utf-8"))
    assert record["summary"]["adamw"]["train_loss"]["mean"] is None


@pytest.mark.slow
def test_mnist_loads_from_folder(tmp_path, shared_data, capsys):
    folder = shared_data / "mnist"
    if not folder.is_dir():
        pytest.skip(f"no data: {folder} does not exist")
    argv = ["--data", "mnist", "--data-dir", str(folder), "--widths", "16", "--steps", "20",
            "--optimizer", "sphere", "--seed", "0"]  # fmt: skip
    assert main([*argv, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "mnist-001.json").read_text(encoding="utf-8"))
    assert record["layers"] == [784, 16, 10]
    assert record["summary"]["sphere"]["test_accuracy"]["mean"] > 20  # chance is 10


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--steps", "-3"], "'-3' is not a whole number, 1 or more"),
        (["--steps", "many"], "'many' is not a whole number, 1 or more"),
        (["--widths", "128", "0"], "'0' is not a whole number, 1 or more"),
        (["--widths"], "expected at least one argument"),
        (["--batch-size", "1.5"], "'1.5' is not a whole number, 1 or more"),
        (["--batch-size", "5000"], "5000 is more than the 1438 training images of digits"),
        (["--seeds", "-1"], "'-1' is not a whole number, 0 or more"),
        (["--seeds", "1", "1"], "1 given more than once"),
        (["--optimizers", "adam"], "invalid choice: 'adam'"),
        (["--optimizers", "muon", "muon"], "muon given more than once"),
        (["--learning-rate", "-1"], "'-1' is not a positive number"),
        (["--learning-rate", "nan"], "'nan' is not a positive number"),
        (["--learning-rate", "muon=fast"], "'fast' is not a positive number"),
        (["--optimizer", "muon", "--learning-rate", "stiefel=1"], "'stiefel' is not among"),
        (["--preset", "exact"], "invalid choice: 'exact'"),
        (["--multiplier", "0"], "'0' is not a positive number"),
        (["--data", "imagenet"], "invalid choice: 'imagenet'"),
        (["--data-dir", "."], "the digits ship inside scikit-learn"),
        (["--data", "mnist", "--data-dir", "no/such"], "there is no folder no/such"),
        (["--data", "mnist", "--data-dir", "empty"], "MNIST: found no train-images"),
        (["--data", "cifar10", "--data-dir", "empty"], "CIFAR-10: found no"),
        (["--name", "a/b"], "'a/b' is not a file name"),
        (["--out", "file"], "cannot write file (File exists)"),
        (["--record-gradients", "file"], "file does not end in .npz"),
        (["--record-gradients", "old.npz"], "old.npz exists; pass --overwrite"),
        (["--stepps", "3"], "unrecognized arguments: --stepps 3"),
        (["digits"], "unrecognized arguments: digits"),
    ],
)
def test_invalid_arguments_give_one_line_error(argv, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("file", "old.npz"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert reason in err
    left = {path.name for path in tmp_path.rglob("*")}
    assert left <= {"empty", "file", "old.npz", "runs"}  # and no file in runs


def test_help_lists_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--widths", "--steps", "--optimizers", "--seeds", "--data", "--preset"):
        assert option in text


@pytest.mark.parametrize(("steps", "numbers"), [(1, 9), (19, 9), (500, 9), (601, 9), (40, 2**25)])
def test_chunks_cover_the_steps(steps, numbers):
    lengths = chunk_lengths(steps, numbers)
    assert sum(lengths) == steps
    assert len(set(lengths)) <= 2  # each length is compiled once
    assert max(lengths) * numbers <= 2**26
    assert numbers > 9 or len(lengths) <= 20


def test_seeds_have_different_splits():
    first, second = (Settings().load(seed) for seed in (0, 1))
    assert first.train_x.shape == second.train_x.shape
    assert not np.array_equal(first.test_y, second.test_y)
    assert first.train_x.mean() == pytest.approx(0, abs=1e-4)
    assert first.train_x.std() == pytest.approx(1, abs=1e-4)
