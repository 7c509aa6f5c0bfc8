"""Studies in several processes: same record, cells saved immediately, no process left running."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from studies import STUDIES, Study, option, run_study
from studies.command import command
from studies.datasets import DatasetError
from studies.run import partial_path
from studies.study import groups_of
from studies.workers import inherited_by_workers, row_of


class Twofold(Exception):
    """Exception that cannot be unpickled: it drops an argument."""

    def __init__(self, one, other):
        super().__init__(one + other)


ERRORS = {
    "burnt": DatasetError("no bread in the shop"),
    "closed": KeyboardInterrupt(),
    "split": Twofold("half", "baked"),
}


@dataclasses.dataclass(frozen=True)
class Errands(Study):
    """How long do errands take?

    The first cell of the baker waits for the last one of the cobbler. In a shop that is shut the
    parent is interrupted, as by Ctrl-C, once the baker's cell of this seed is saved.
    """

    name: ClassVar[str] = "errands"

    shops: tuple[str, ...] = option(("baker", "cobbler"), "to go to")
    seeds: tuple[int, ...] = option((0, 1, 2), "one errand for each")
    folder: Path | None = option(None, "where each errand leaves a note", recorded=False)

    def cells(self):
        clock = [{"seed": 0, "shop": "clock"}]
        return clock + [{"seed": seed, "shop": shop} for shop in self.shops for seed in self.seeds]

    def timed(self, cell):
        return cell["shop"] == "clock"

    def run(self, cell):
        seed, shop = cell["seed"], cell["shop"]
        in_worker = multiprocessing.parent_process() is not None
        if shop in ERRORS:
            raise ERRORS[shop]
        if in_worker and seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if in_worker and shop == "shut":
            self._wait_until_saved({"seed": seed, "shop": "baker"})
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)  # until the parent ends this worker
        if in_worker and self.folder is not None:
            if (shop, seed) == ("cobbler", 2):
                self._wait_until_saved({"seed": 0, "shop": "cobbler"})
            if (shop, seed) == ("baker", 0):
                self._wait_until_saved({"seed": 2, "shop": "cobbler"})
        if self.folder is not None:
            note = {
                "pid": os.getpid(),
                "before": sum(1 for _ in self.folder.glob("*.note")),
                "flags": os.environ["XLA_FLAGS"],
                "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
                "ignores_sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            }
            (self.folder / f"{shop}-{seed}.note").write_text(json.dumps(note), encoding="utf-8")
        return {"minutes": np.random.default_rng([seed, len(shop)]).random(), "cost": np.inf}

    def _wait_until_saved(self, cell):
        assert self.folder is not None
        kept, end = partial_path(self.folder / "errands.json"), time.monotonic() + 60
        while json.dumps(json.dumps(cell)) not in kept.read_text(encoding="utf-8"):
            assert time.monotonic() < end, f"{cell} was not saved"
            time.sleep(0.01)

    def summarise(self, rows):
        return {"minutes": sum(row["minutes"] for row in rows)}

    def table(self, record):
        return ""

    def plot(self, record):
        return None


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise `KeyboardInterrupt`, even if the suite was started in the background, where
    shells make programs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_two_workers_match_single_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    record = run_study(Errands(folder=tmp_path), tmp_path / "errands.json", jobs=2)
    assert record == run_study(Errands())
    assert [(row["shop"], row["seed"]) for row in record["rows"]] == [
        ("clock", 0), ("baker", 0), ("baker", 1), ("baker", 2),
        ("cobbler", 0), ("cobbler", 1), ("cobbler", 2),
    ]  # fmt: skip
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before
    assert multiprocessing.active_children() == []
    assert not partial_path(tmp_path / "errands.json").exists()

    notes = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in tmp_path.glob("*.note")}
    clock = notes.pop("clock-0")
    assert (clock["pid"], clock["before"], clock["ignores_sigint"]) == (os.getpid(), 6, False)
    whose = {shop: {n["pid"] for k, n in notes.items() if shop in k} for shop in Errands().shops}
    assert [len(pids) for pids in whose.values()] == [1, 1]
    assert len({os.getpid()}.union(*whose.values())) == 3
    flags = os.environ["XLA_FLAGS"] + " --xla_cpu_multi_thread_eigen=false"
    for note in notes.values():
        assert (note["flags"], note["threads"], note["ignores_sigint"]) == (flags, "1", True)


@pytest.mark.usefixtures("interruptible")
def test_interruption_ends_workers_and_keeps_cells(tmp_path, capsys):
    out = tmp_path / "errands.json"
    argv = ["--shops", "baker", "shut", "--seeds", "1", "--jobs", "2", "--out", str(out)]
    assert command(Errands, [*argv, "--folder", str(tmp_path)]) == 130
    assert f"kept in {partial_path(out)}" in capsys.readouterr().err
    kept = [json.loads(line) for line in partial_path(out).read_text("utf-8").splitlines()[1:]]
    assert [(entry["row"]["shop"], entry["row"]["seed"]) for entry in kept] == [("baker", 1)]
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_environment_is_restored_after_workers_start(handler):
    """For any previous handler, including an ignored SIGINT, as in a shell's background."""
    signal.signal(signal.SIGINT, handler)
    before = dict(os.environ)
    with contextlib.suppress(KeyError), inherited_by_workers():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert os.environ["OMP_NUM_THREADS"] == "1"
        raise KeyError
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == (before, handler)


def test_dead_worker_is_reported_and_cells_are_kept(tmp_path, capsys):
    out = tmp_path / "errands.json"
    argv = ["--shops", "baker", "--seeds", "5", "13", "6", "--out", str(out), "--jobs", "2"]
    with pytest.raises(SystemExit, match="2"):
        command(Errands, argv)
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: a worker was killed by SIGKILL")
    assert "in the cell seed 13, shop baker" in told
    assert f"kept in {partial_path(out)}" in told
    kept = [json.loads(line) for line in partial_path(out).read_text("utf-8").splitlines()[1:]]
    assert [entry["row"]["seed"] for entry in kept] == [5]

    study = Errands(shops=("baker",), seeds=(5, 13, 6), folder=tmp_path)
    assert run_study(study, out) == run_study(dataclasses.replace(study, folder=None))
    assert sorted(p.stem for p in tmp_path.glob("*.note")) == ["baker-13", "baker-6", "clock-0"]


@pytest.mark.parametrize(
    ("shop", "kind", "message"),
    [
        ("burnt", DatasetError, "no bread in the shop"),
        ("closed", KeyboardInterrupt, ""),
        ("split", RuntimeError, "Twofold: halfbaked"),
    ],
)
def test_worker_errors_survive_pickling(shop, kind, message):
    with pytest.raises(kind) as caught:
        row_of(pickle.dumps(Errands()), {"seed": 0, "shop": shop})
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_worker_errors_are_reported(tmp_path):
    with pytest.raises(DatasetError, match="no bread") as caught:
        run_study(Errands(shops=("burnt",), seeds=(1,)), tmp_path / "errands.json", jobs=2)
    assert "in run" in str(caught.value.__cause__)  # the traceback of the worker


def test_study_that_a_worker_cannot_load_raises():
    with pytest.raises(ValueError, match="cannot load the study .ModuleNotFoundError.*no_such_"):
        row_of(b"cno_such_module\nStudy\n.", {"seed": 0})


def test_study_that_cannot_be_pickled_raises(tmp_path):
    class Local(Errands):
        """A study inside a function."""

    with pytest.raises(ValueError, match="errands cannot go to another process") as error:
        run_study(Local(), tmp_path / "errands.json", jobs=2)
    assert "\n" not in str(error.value)
    assert run_study(Local(), tmp_path / "errands.json")["summary"]["minutes"] > 0


def test_zero_jobs_raise(tmp_path, capsys):
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        run_study(Errands(), tmp_path / "errands.json", jobs=0)
    with pytest.raises(SystemExit, match="2"):
        command(Errands, ["--jobs", "-1", "--out", str(tmp_path / "errands.json")])
    assert capsys.readouterr().err.startswith("error: jobs must be at least 1; got -1")
    assert list(tmp_path.iterdir()) == []


def test_cells_sharing_programs_stay_together():
    class Priced(Errands):
        """Study with programs that depend on the seed, not on the shop."""

        traced: ClassVar[tuple[str, ...]] = ("shop",)

    cells = [{"shop": shop, "rate": r, "seed": s} for shop in "ab" for r in (1, 2) for s in (3, 4)]
    assert groups_of(Errands(), cells) == [cells[:4], cells[4:]]
    some = [{"shop": shop, "seed": seed} for seed, shop in ((1, "a"), (1, "b"), (2, "b"), (1, "c"))]
    assert groups_of(Priced(), some) == [some[:2], some[2:3], some[3:]]


def test_timed_cells_of_studies():
    studies = {name: kind() for name, kind in STUDIES.items()}
    timed = [(name, cell) for name, study in studies.items() for cell in study.cells()
             if study.timed(cell)]  # fmt: skip
    # Every cell of `certified` compares methods by their CPU time.
    costs = {("retractions", "cost"), ("weight-spaces", "cost"), ("certified", None)}
    assert {(name, cell.get("part")) for name, cell in timed} == costs
