"""Kill `make train` repeatedly and compare its final checkpoint with an undisturbed run's.

    python -m benchmarks.kills      # five minutes; docs/benchmarks/results/kills.json

Alternate kills hit while a checkpoint is being written and at a random time after a checkpoint.
Each time the same command resumes, with a checkpoint after every chunk of steps.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._command import command
from studies.program import integer, parse, save

JOB = (
    *("--widths", "64", "--steps", "300", "--seeds", "0", "1", "2"),
    *("--optimizers", "stiefel", "muon"),
)
_TEMPORARY = ".orbax-checkpoint-tmp"


def main() -> int:
    """Run the job undisturbed and disturbed, write the record, and return 1 if they differ."""
    p = command("kills", "Kills and resumes the main job, and compares its end to the undisturbed.")
    p.add_argument("--kills", type=integer(1), default=20, help="how many (default: %(default)s)")
    given = parse(p, None)
    with TemporaryDirectory() as folder:
        run(["--checkpoint", f"{folder}/whole"], JOB, folder)
        found = killed(Path(folder), given.kills, JOB, seed=0)
        run(["--checkpoint", f"{folder}/killed"], JOB, folder)
        whole, other = (ending(Path(folder, name)) for name in ("whole", "killed"))
    record = {
        "job": JOB,
        "kills": found,
        "resumes": len(found),
        "largest_loss_in_chunks": max(kill["lost"] for kill in found),
        "while_saving": sum(kill["saving"] for kill in found),
        "same_bits": whole == other,
    }
    save(given, record)
    print({name: record[name] for name in record if name != "kills"})
    return 0 if record["same_bits"] else 1


def run(options: Sequence[str], job: Sequence[str], out: str | Path) -> None:
    """Run the job to its end."""
    subprocess.run(command_line(options, job, out), check=True, stdout=subprocess.DEVNULL)


def command_line(options: Sequence[str], job: Sequence[str], out: str | Path) -> list[str]:
    """Return the command line of the job, with a checkpoint after every chunk."""
    program = [sys.executable, "-m", "studies.digits", *job, "--out", str(out)]
    return [*program, "--checkpoint-every", "0", *options]


def killed(folder: Path, kills: int, job: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Start the job and kill it, repeatedly.

    Args:
      folder: parent of the checkpoint folder `killed`.
      kills: number of kills; the first, third, ... hit while a checkpoint is being written.
      job: options of the job, which must outlast all kills.
      seed: seed of the times between checkpoint and kill.

    Returns:
      For each kill: `saved`, the newest complete step; `lost`, the number of later chunks trained,
      as visible in the folder; `saving`, whether a checkpoint was being written; `from`, the newest
      complete step when the process started.
    """
    moments, found, place = random.Random(seed), [], folder / "killed"
    for number in range(kills):
        during, begun = number % 2 == 0, max(steps(place), default=0)
        with process(command_line(["--checkpoint", str(place)], job, folder)) as trained:
            while max(steps(place), default=0) == begun or (during and not saving(place)):
                if trained.poll() is not None:
                    raise RuntimeError(f"the job ended by itself, with status {trained.returncode}")
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.05 if during else 0.5))
        reached, newest = {*steps(place), *saving(place)}, max(steps(place))
        lost = sum(step > newest for step in reached)
        found.append({"from": begun, "saved": newest, "lost": lost, "saving": bool(saving(place))})
    return found


@contextlib.contextmanager
def process(line: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process; kill it at the end of the block."""
    null = subprocess.DEVNULL
    with subprocess.Popen(line, stdout=null, stderr=null) as started:
        try:
            yield started
        finally:
            os.kill(started.pid, signal.SIGKILL)


def steps(place: Path) -> list[int]:
    """Return the steps with complete checkpoints."""
    return [int(name) for name in _names(place) if name.isdecimal()]


def saving(place: Path) -> list[int]:
    """Return the steps with checkpoints being written, or interrupted by a kill."""
    names = [name.partition(_TEMPORARY) for name in _names(place)]
    return [int(step) for step, temporary, _ in names if temporary and step.isdecimal()]


def ending(place: Path) -> dict[str, Any]:
    """Return the newest step, its array digests, and all curves without times."""
    record = json.loads((place / str(max(steps(place))) / "record" / "metadata").read_text())
    runs = {
        name: [{k: v for k, v in run.items() if k != "milliseconds"} for run in runs]
        for name, runs in record["extra"]["runs"].items()
    }
    return {"step": max(steps(place)), "digests": record["digests"], "runs": runs}


def _names(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()] if place.is_dir() else []


if __name__ == "__main__":
    sys.exit(main())
