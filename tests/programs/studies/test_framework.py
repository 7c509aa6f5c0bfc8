"""The framework of the studies: records, resuming, processes, errors and the command line."""

import dataclasses
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from studies import STUDIES, Study, option, run_study
from studies.__main__ import main
from studies.command import command
from studies.run import partial_path
from studies.study import groups_of

CALLS: list[int] = []


@dataclasses.dataclass(frozen=True)
class Coins(Study):
    """How often does a coin show heads?

    By tossing it. The coin of seed 13 interrupts this process, as Ctrl-C, or kills its own.
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

    def timed(self, cell):
        return cell["seed"] == 100

    def run(self, cell):
        CALLS.append(cell["seed"])
        if cell["seed"] == 13 and self.metal == "tin":
            os.kill(os.getpid(), signal.SIGKILL)
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


class Processes(Coins):
    """Coins that note where they were tossed."""

    def run(self, cell):
        threads = os.environ.get("NPROC") if multiprocessing.parent_process() else "this process"
        return {**super().run(cell), "threads": threads, "pid": os.getpid()}


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
    path, study = tmp_path / "coins.json", Coins(seeds=(0, 1, 13))
    with pytest.raises(KeyboardInterrupt):
        run_study(study, path)
    kept = partial_path(path)
    saved = kept.read_text(encoding="utf-8").replace("13]", "2]")
    kept.write_text(saved[: len(saved) - cut])  # as by a power cut during the write
    CALLS.clear()
    record = run_study(Coins(), path)
    assert ([1, 2] if cut else [2]) == CALLS
    assert record == run_study(Coins())
    assert not kept.exists()


def test_partial_cells_of_other_settings_raise(tmp_path):
    path = tmp_path / "coins.json"
    with pytest.raises(KeyboardInterrupt):
        run_study(Coins(seeds=(0, 13)), path)
    before = partial_path(path).read_bytes()
    with pytest.raises(ValueError, match="tosses: 8 there, 9 here.; delete it or") as error:
        run_study(Coins(tosses=9, seeds=(0, 13)), path)
    assert "\n" not in str(error.value)
    assert partial_path(path).read_bytes() == before


@pytest.mark.parametrize("damage", [b"{\n", b"\xbd\n", b"[1]\n", b"{}\n"])
@pytest.mark.parametrize("lines", [0, 1])
def test_damaged_partial_cells_raise_and_stay(tmp_path, lines, damage):
    path = tmp_path / "coins.json"
    with pytest.raises(KeyboardInterrupt):
        run_study(Coins(seeds=(0, 13)), path)
    kept = partial_path(path)
    damaged = b"".join(kept.read_bytes().splitlines(keepends=True)[:lines]) + damage
    kept.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(kept))} is damaged .*; delete it or"):
        run_study(Coins(seeds=(0, 13)), path)
    assert kept.read_bytes() == damaged


def test_record_is_not_overwritten_by_default(tmp_path):
    path = tmp_path / "coins.json"
    first = run_study(Coins(), path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        run_study(Coins(tosses=9), path)
    assert len(CALLS) == 3
    assert json.loads(path.read_text(encoding="utf-8")) == first
    assert run_study(Coins(tosses=9), path, overwrite=True) != first


def test_invalid_choice_and_jobs_raise_without_command(tmp_path):
    with pytest.raises(ValueError, match="metal must be among .* got 'lead'"):
        run_study(Coins(metal="lead"))
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        run_study(Coins(), tmp_path / "coins.json", jobs=0)
    assert CALLS == list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_match_single_process():
    """Timed cells run in this process, after the others."""
    study = Processes(seeds=(100, 0, 1, 2))
    several, single = run_study(study, jobs=2), run_study(study)
    for row, same in zip(several["rows"], single["rows"], strict=True):
        assert row["heads"] == same["heads"]
    timed, *others = several["rows"]
    assert (timed["threads"], timed["pid"]) == ("this process", os.getpid())
    assert {row["threads"] for row in others} == {"1"}
    assert os.getpid() not in {row["pid"] for row in others}


def test_dead_process_is_reported_and_cells_are_kept(tmp_path, capsys):
    out = tmp_path / "coins.json"
    argv = ["--metal", "tin", "--seeds", "100", "13", "--out", str(out), "--jobs", "2"]
    with pytest.raises(SystemExit, match="2"):
        command(Coins, argv)
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"error: .*SIGKILL.*kept in {re.escape(str(partial_path(out)))}", told)


SCRIPT = """
import signal, sys, time
from studies.command import command
from tests.programs.studies.test_framework import Coins

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background

class Slow(Coins):
    traced = ()

    def run(self, cell):
        time.sleep(cell["seed"])
        return super().run(cell)

sys.exit(command(Slow, sys.argv[1:]))
"""


@pytest.mark.slow
def test_interruption_ends_processes_and_keeps_cells(tmp_path):
    """Ctrl-C reaches the whole group of processes, as from a terminal."""
    kept, script = partial_path(tmp_path / "coins.json"), tmp_path / "slow.py"
    script.write_text(SCRIPT, encoding="utf-8")
    line = f"{sys.executable} {script} --seeds 0 300 --jobs 2 --out {tmp_path / 'coins.json'}"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        line.split(), env=path, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as run:
        end = time.monotonic() + 120
        while not kept.exists() or kept.read_text().count("\n") < 2:
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"kept in {kept}" in told
    with pytest.raises(ProcessLookupError):  # noqa: PT012
        while time.monotonic() < end:  # workers end a moment later
            os.killpg(run.pid, 0)
            time.sleep(0.1)


def test_cells_sharing_programs_stay_together():
    cells = [{"shop": shop, "rate": r, "seed": s} for shop in "ab" for r in (1, 2) for s in (3, 4)]
    assert groups_of(Coins(), cells) == [cells[:4], cells[4:]]


def test_command_writes_record_and_replots(tmp_path, capsys):
    out = tmp_path / "a" / "coins.json"
    argv = ["--tosses", "5", "--edge", "--seeds", "3", "4", "--out", str(out)]
    assert command(Coins, argv) == 0
    settings = json.loads(out.read_text(encoding="utf-8"))["settings"]
    assert settings == Coins(tosses=5, edge=True, seeds=(3, 4)).settings()
    picture = out.with_suffix(".png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    table = re.findall("^heads.*", capsys.readouterr().out, re.MULTILINE)
    CALLS.clear()
    again = tmp_path / "again.png"
    assert command(Coins, ["--plot", str(out), "--out", str(again)]) == 0
    assert again.read_bytes() == picture
    assert CALLS == []
    assert table == re.findall("^heads.*", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tosses", "0"], "tosses must be at least 1; got 0"),
        (["--tosses", "x"], "argument --tosses: invalid int value"),
        (["--bias", "nan"], "is not a finite number"),
        (["--metal", "lead"], "invalid choice"),
        (["--toss", "4"], "unrecognized arguments"),
        (["--out", "coins.txt"], "must end in .json"),
        (["--out", "there.json"], "pass --overwrite, or choose another name"),
        (["--plot", "missing.json"], "missing.json cannot be read as a record"),
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
    assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert CALLS == []
    assert len(list(tmp_path.iterdir())) == 3


def test_unwritable_folder_promises_no_cells(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        command(Coins, ["--out", str(tmp_path / "file" / "coins.json")])
    error = capsys.readouterr().err
    assert re.fullmatch("error: cannot write .*coins.json.partial .*another folder.*\n", error)
    assert "cells are kept" not in error
    assert CALLS == []


def test_full_disk_keeps_finished_cells(tmp_path, capsys, monkeypatch):
    """A file-size limit makes the kernel refuse writes as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "coins.json"
    whole = run_study(Coins(), tmp_path / "whole.json")
    toss = Coins.run

    def run(self, cell):
        if cell["seed"] == 2:
            size = partial_path(path).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        return toss(self, cell)

    monkeypatch.setattr(Coins, "run", run)
    try:
        with pytest.raises(SystemExit, match="2"):
            command(Coins, ["--out", str(path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: cannot write {partial_path(path)} (")
    assert re.search("make room or choose another folder.*the same command resumes from", error)
    monkeypatch.setattr(Coins, "run", toss)
    CALLS.clear()
    assert command(Coins, ["--out", str(path)]) == 0
    assert CALLS == [2]
    assert json.loads(path.read_text(encoding="utf-8")) == whole


def test_unknown_study_gives_error(capsys):
    assert main(["no-such-study"]) == 2
    assert "newton-schulz" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_study_has_help_and_settings_round_trip(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert "?" in capsys.readouterr().out  # a study asks a question
    study = STUDIES[name]()
    assert study.name == name
    assert study.from_settings(study.settings()) == study
    assert len({json.dumps(cell) for cell in study.cells()}) == len(study.cells()) > 0
