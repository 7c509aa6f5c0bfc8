"""Full or read-only disks: a one-line error with advice, and saved files are kept."""

import contextlib
import json
import resource
from pathlib import Path

import pytest

from studies.digits import __main__ as train
from studies.digits import figure
from studies.program import command, parse, save

TINY = ["--widths", "8", "--steps", "10", "--seeds", "0", "--optimizers", "muon"]
NOWHERE = Path("/proc/self/task")  # no user can make files there
ADVICE = "what was saved before is unchanged: make room or choose another folder"


@contextlib.contextmanager
def full(size: int):
    """Limit the size of files, in bytes: the kernel refuses writes as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not NOWHERE.is_dir(), reason="needs Linux")
def test_unwritable_folder_is_reported_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "load_all", lambda _: pytest.fail("work was done"))
    for option in ("--out", "--checkpoint"):
        with pytest.raises(SystemExit, match="2"):
            train.main([*TINY, "--out", str(tmp_path), option, str(NOWHERE)])
    p = command("name", "An example.")
    with pytest.raises(SystemExit, match="2"):
        parse(p, ["--out", str(NOWHERE / "a.json")])
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(x.startswith(f"error: cannot write {NOWHERE} (") and ADVICE in x for x in errors)


def test_full_disk_is_reported_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "load_all", lambda _: pytest.fail("work was done"))
    with pytest.raises(SystemExit, match="2"), full(100):
        train.main([*TINY, "--out", str(tmp_path)])
    assert f"cannot write {tmp_path} (" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_disk_that_fills_up_keeps_earlier_files(checkpointed, tmp_path, capsys, monkeypatch):
    """The disk has room for the record of a job, but not for its picture."""
    saved = figure.save

    def save_picture(*arguments):
        with full(2**14):
            saved(*arguments)

    monkeypatch.setattr(figure, "save", save_picture)
    kept = ["--checkpoint", str(tmp_path / "kept")] if checkpointed else []
    assert train.main([*TINY, "--out", str(tmp_path / "runs"), "--name", "job", *kept]) == 1
    printed = capsys.readouterr()
    (error,) = (x for x in printed.err.splitlines() if x.startswith("error:"))
    assert f"cannot write {tmp_path / 'runs' / 'job.png'} (" in error
    assert ADVICE in error
    assert ("the same command writes the rest" in error) == checkpointed
    assert "Muon" in printed.out
    assert f"written: {tmp_path / 'runs' / 'job.json'}\n" in printed.out
    assert [x.name for x in (tmp_path / "runs").iterdir()] == ["job.json"]
    assert json.loads((tmp_path / "runs" / "job.json").read_text("utf-8"))["runs"]["muon"]


def test_failed_write_keeps_old_record(tmp_path):
    given = parse(command("name", "An example."), ["--out", str(tmp_path / "a.json")])
    save(given, {"runs": [1]})
    with pytest.raises(SystemExit) as ended, full(2**12):
        save(given, {"runs": list(range(5000))}, replace=True)
    assert str(ended.value).startswith(f"error: cannot write {tmp_path / 'a.json'} (")
    assert ADVICE in str(ended.value)
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["runs"] == [1]
    assert [x.name for x in tmp_path.iterdir()] == ["a.json"]
