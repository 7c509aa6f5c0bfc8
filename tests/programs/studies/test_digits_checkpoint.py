"""`make train --checkpoint`: killed, resumed, finished, and on a full disk."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from studies.digits.__main__ import main

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("no_futures_left"),
]

# AdamW, which has no geometry, and a manifold.
JOB = ["--widths", "16", "--steps", "8", "--batch-size", "32", "--seeds", "0", "3",
       "--optimizers", "adamw", "sphere"]  # fmt: skip
TOTAL = 2 * 2 * 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Run the job uninterrupted; return the folder of checkpoints (the record is next to it)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder / "kept", folder) == 0
    return folder / "kept"


def train(kept, out, *options):
    return main([*command_line(kept, out), *options])


def command_line(kept, out):
    return [*JOB, "--checkpoint", str(kept), "--checkpoint-every", "0", "--out", str(out)]


def names(kept):
    return [path.name for path in kept.iterdir()] if kept.is_dir() else []


def steps(kept):
    """Return the steps with complete checkpoints."""
    return [int(name) for name in names(kept) if name.isdecimal()]


def saving(kept):
    """Return the steps with checkpoints being written, or interrupted by a kill."""
    parts = [name.partition(".orbax-checkpoint-tmp") for name in names(kept)]
    return [int(step) for step, temporary, _ in parts if temporary and step.isdecimal()]


def kill_while_saving(kept, out):
    """Start the job in a process and kill it while it writes a checkpoint after the first."""
    line = [sys.executable, "-m", "studies.digits", *command_line(kept, out)]
    null = subprocess.DEVNULL
    with subprocess.Popen(line, stdout=null, stderr=null) as trained:
        while not steps(kept) or not saving(kept):
            assert trained.poll() is None
            time.sleep(0.001)
        os.kill(trained.pid, signal.SIGKILL)


def ending(kept):
    """Return the newest step, its array digests, and all curves without times."""
    newest = max(steps(kept))
    record = json.loads((kept / str(newest) / "record" / "metadata").read_text())
    return newest, record["digests"], without_times(record["extra"])


def without_times(record):
    runs = record["runs"].values()
    return [[{k: v for k, v in run.items() if k != "milliseconds"} for run in r] for r in runs]


@pytest.mark.slow
def test_killed_job_resumes_bit_for_bit(undisturbed, tmp_path, capsys):
    kept = tmp_path / "killed"
    kill_while_saving(kept, tmp_path)
    saved = max(steps(kept))
    assert len({step for step in saving(kept) if step > saved}) <= 1
    assert train(kept, tmp_path) == 0
    out, _ = capsys.readouterr()
    assert f"killed holds {saved} of {TOTAL} steps: resuming there" in out
    assert ending(kept) == ending(undisturbed)
    first, second = (
        json.loads((folder / "digits-001.json").read_text())
        for folder in (undisturbed.parent, tmp_path)
    )
    assert without_times(first) == without_times(second)


def test_finished_job_writes_record_without_training(undisturbed, tmp_path, capsys):
    assert train(undisturbed, tmp_path) == 0
    out, err = capsys.readouterr()
    assert f"kept holds {TOTAL} of {TOTAL} steps: nothing is left to train" in out
    assert f"{TOTAL}/{TOTAL}" in err  # the bar
    assert (tmp_path / "digits-001.png").exists()
    first, second = (
        json.loads((folder / "digits-001.json").read_text())
        for folder in (undisturbed.parent, tmp_path)
    )
    assert first == second  # including times: nothing was trained


def refusal(kept, out, capsys, *options):
    with pytest.raises(SystemExit) as stop:
        train(kept, out, *options)
    assert stop.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_checkpoints_of_another_job_raise(undisturbed, tmp_path, capsys):
    line = refusal(undisturbed, tmp_path, capsys, "--batch-size", "64")
    assert f"{undisturbed} holds another job (batch_size: 32 there, 64 here); choose" in line


def test_damaged_checkpoint_raises(undisturbed, tmp_path, capsys):
    kept = shutil.copytree(undisturbed, tmp_path / "kept")
    shutil.move(kept / str(TOTAL), tmp_path / "finished")
    (before,) = steps(kept)
    for file in (kept / str(before) / "tree").rglob("manifest.ocdbt"):
        file.write_bytes(file.read_bytes()[:-1])
    line = refusal(kept, tmp_path, capsys)
    assert f"step {before} in {kept} is damaged: " in line
    assert "no older step is whole: move it away to begin again" in line


@pytest.mark.slow
def test_full_disk_warns_once_and_keeps_results(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**9, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Do not write the record and the picture: the limit is for the checkpoints.
            patch.setattr("studies.digits.__main__.write", lambda *_: [])
            assert train(tmp_path / "kept", tmp_path) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    assert err.count("warning: ") == 1
    assert "File too large): nothing that it holds has changed" in err
    assert "; training continues\n" in err
    assert "hypersphere descent" in out
    assert steps(tmp_path / "kept") == []
