"""The framework of the studies: settings, resuming, errors and the command line."""

import dataclasses
import json
import resource
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from studies import STUDIES, Study, option, run_study
from studies.__main__ import main
from studies.command import command
from studies.run import partial_path


class Broken(Exception):
    """Simulates a power cut."""


CALLS: list[int] = []


@dataclasses.dataclass(frozen=True)
class Coins(Study):
    """How often does a coin show heads?

    By tossing it.
    """

    name: ClassVar[str] = "coins"

    tosses: int = option(8, "tosses of each coin; 100 % of them count")
    bias: float = option(0.5, "of heads")
    metal: str = option("gold", "of the coin", choices=("gold", "tin"))
    edge: bool = option(False, "whether it may land on its edge")
    most: int | None = option(None, "at most so many heads")
    folder: Path | None = option(None, "with the coins", recorded=False)
    seeds: tuple[int, ...] = option((0, 1, 2), "one coin for each")

    def __post_init__(self):
        if self.tosses < 1:
            raise ValueError(f"tosses must be at least 1; got {self.tosses}")

    def cells(self):
        return [{"seed": seed} for seed in self.seeds]

    def run(self, cell):
        CALLS.append(cell["seed"])
        if cell["seed"] == 13:
            raise KeyboardInterrupt
        rng = np.random.default_rng(cell["seed"])
        return {"heads": rng.random(self.tosses).mean(), "edge": np.float32("nan")}

    def summarise(self, rows):
        assert all(row["edge"] is None for row in rows)  # as in the saved record
        return {"heads": np.mean([row["heads"] for row in rows])}

    def table(self, record):
        return f"heads: {record['summary']['heads']:.3f}"

    def plot(self, record):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1, 1))
        figure.subplots().plot([row["heads"] for row in record["rows"]])
        return figure


class Interrupted(Coins):
    """Coins that raise at the third seed."""

    def run(self, cell):
        if cell["seed"] == 2:
            raise Broken
        return super().run(cell)


@pytest.fixture(autouse=True)
def no_calls(monkeypatch):
    """Run all cells in this process, so that calls can be counted; clear the count."""
    monkeypatch.setattr("studies.command.default_jobs", lambda: 1)
    CALLS.clear()


def test_record_contains_settings_and_results(tmp_path):
    record = run_study(Coins(folder=tmp_path), tmp_path / "coins.json")
    assert json.loads((tmp_path / "coins.json").read_text(encoding="utf-8")) == record
    assert record["settings"] == {
        "tosses": 8, "bias": 0.5, "metal": "gold", "edge": False, "most": None, "seeds": [0, 1, 2],
    }  # fmt: skip
    heads = [np.random.default_rng(seed).random(8).mean() for seed in (0, 1, 2)]
    assert [row["heads"] for row in record["rows"]] == heads
    assert record["summary"] == {"heads": np.mean(heads)}
    assert record["environment"]["numpy"] == np.__version__
    assert Coins.from_settings(record["settings"]) == Coins()
    assert [path.name for path in tmp_path.iterdir()] == ["coins.json"]


@pytest.mark.parametrize("cut", [0, 7])
def test_interrupted_study_resumes(tmp_path, cut):
    path = tmp_path / "coins.json"
    with pytest.raises(Broken):
        run_study(Interrupted(), path)
    assert CALLS == [0, 1]
    kept = partial_path(path)
    if cut:  # in the middle of a line, as by a power cut during the write
        kept.write_bytes(kept.read_bytes()[:-cut])
    record = run_study(Coins(), path)
    assert ([0, 1, 1, 2] if cut else [0, 1, 2]) == CALLS
    assert record == run_study(Coins())
    assert not kept.exists()


def test_partial_cells_of_other_settings_raise(tmp_path):
    path = tmp_path / "coins.json"
    with pytest.raises(Broken):
        run_study(Interrupted(), path)
    before = partial_path(path).read_bytes()
    with pytest.raises(ValueError, match="tosses: 8 there, 9 here.; delete it or") as error:
        run_study(Coins(tosses=9), path)
    assert "\n" not in str(error.value)
    assert partial_path(path).read_bytes() == before
    assert CALLS == [0, 1]


def test_record_is_not_overwritten_by_default(tmp_path):
    path = tmp_path / "coins.json"
    first = run_study(Coins(), path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        run_study(Coins(tosses=9), path)
    assert len(CALLS) == 3
    assert json.loads(path.read_text(encoding="utf-8")) == first
    assert run_study(Coins(tosses=9), path, overwrite=True) != first


def test_invalid_choice_raises_without_command():
    with pytest.raises(ValueError, match="metal must be among .* got 'lead'"):
        run_study(Coins(metal="lead"))
    assert CALLS == []


def test_results_with_keys_of_the_cell_raise():
    class Confused(Coins):
        """A coin that changes its seed."""

        def run(self, cell):
            return {"seed": 1}

    with pytest.raises(ValueError, match=r"measures \['seed'\]"):
        run_study(Confused())


def test_command_writes_record_and_replots(tmp_path, capsys):
    out = tmp_path / "a" / "coins.json"
    argv = ["--tosses", "5", "--edge", "--seeds", "3", "4", "--out", str(out)]
    assert command(Coins, argv) == 0
    settings = json.loads(out.read_text(encoding="utf-8"))["settings"]
    assert settings == Coins(tosses=5, edge=True, seeds=(3, 4)).settings()
    picture = out.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("heads")]

    CALLS.clear()
    again = tmp_path / "again.png"
    assert command(Coins, ["--plot", str(out), "--out", str(again)]) == 0
    assert again.read_bytes() == picture
    assert CALLS == []
    assert table == [l for l in capsys.readouterr().out.splitlines() if l.startswith("heads")]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tosses", "0"], "tosses must be at least 1; got 0"),
        (["--tosses", "x"], "argument --tosses: invalid int value"),
        (["--bias", "nan"], "is not a finite number"),
        (["--metal", "lead"], "invalid choice"),
        (["--toss", "4"], "unrecognized arguments"),
        (["--out", "coins.txt"], "does not end in .json"),
        (["--out", "there.json"], "pass --overwrite, or choose another name"),
        (["--plot", "missing.json"], "missing.json is not a record that can be read"),
        (["--plot", "there.json"], "there.json is not a record of the study coins"),
        (["--plot", "record.json"], "record.png exists; pass --overwrite"),
    ],
)
def test_invalid_arguments_give_one_line_error(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("there.json").write_text("{}", encoding="utf-8")
    Path("record.json").write_text('{"study": "coins"}', encoding="utf-8")
    Path("record.png").touch()
    with pytest.raises(SystemExit, match="2"):
        command(Coins, argv)
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1
    assert CALLS == []
    assert len(list(tmp_path.iterdir())) == 3


def test_interruption_is_reported(tmp_path, capsys):
    out = tmp_path / "coins.json"
    assert command(Coins, ["--seeds", "5", "13", "--out", str(out)]) == 130
    assert f"kept in {partial_path(out)}" in capsys.readouterr().err
    assert CALLS == [5, 13]
    assert not out.exists()


def test_studies_are_listed(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name, study in STUDIES.items():
        assert study.name == name
        assert f"  {name}  " in listed
    assert main(["no-such-study"]) == 2
    assert "newton-schulz" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_study_has_help_and_settings_round_trip(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert "?" in capsys.readouterr().out  # a study asks a question
    study = STUDIES[name]()
    assert study.from_settings(study.settings()) == study
    assert len({json.dumps(cell) for cell in study.cells()}) == len(study.cells()) > 0


def test_full_disk_keeps_finished_cells(tmp_path, capsys, monkeypatch):
    """A file-size limit makes the kernel refuse writes as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "coins.json"
    whole = run_study(Coins(), tmp_path / "whole.json")

    def run(self, cell):
        if cell["seed"] == 2:
            size = partial_path(path).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        return Coins.run(self, cell)

    filling = dataclasses.make_dataclass("Filling", [], bases=(Coins,), frozen=True)
    monkeypatch.setattr(filling, "run", run, raising=False)
    try:
        with pytest.raises(SystemExit, match="2"):
            command(filling, ["--out", str(path), "--jobs", "1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: cannot write {partial_path(path)} (")
    assert "make room or choose another folder" in error
    assert "the same command resumes from there" in error
    CALLS.clear()
    assert command(Coins, ["--out", str(path), "--jobs", "1"]) == 0
    assert CALLS == [2]
    assert json.loads(path.read_text(encoding="utf-8")) == whole
    assert not [x.name for x in tmp_path.iterdir() if x.name.startswith(".")]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_unwritable_folder_is_reported_before_any_work(capsys):
    CALLS.clear()
    with pytest.raises(SystemExit, match="2"):
        command(Coins, ["--out", "/proc/self/task/coins.json", "--jobs", "1"])
    (error,) = capsys.readouterr().err.splitlines()
    assert "cannot write /proc/self/task/coins.json.partial (" in error
    assert CALLS == []
