"""`--checkpoint`: save the job, and resume it."""

import dataclasses
import logging
import sys
import time
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from manifoldmuon.checkpoints import CheckpointError, Checkpoints
from studies.digits.loop import Carry, Run, Trainer
from studies.digits.settings import Settings
from studies.records import environment, plain
from studies.run import differences


class JobCheckpoints:
    """Checkpoints of a job: weights and state of the current run, and the curves of all runs.

    Steps are counted over all runs. Saving is synchronous: in the background it would disturb the
    measured times.

    Attributes:
      runs: finished runs by optimizer, in the order of the seeds, followed by the unfinished run.
      compile_seconds: compile time by optimizer.
    """

    def __init__(self, directory: Path, seconds: float, settings: Settings):
        """Read the progress of the job.

        Args:
          directory: folder with checkpoints of this job, or without checkpoints.
          seconds: minimum time between checkpoints.
          settings: settings of the job.

        Raises:
          CheckpointError: the folder is unreadable, or holds another job.
        """
        for name in ("absl", "asyncio"):  # Orbax logs errors before raising them
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self._checkpoints = Checkpoints(directory, options)
        self._directory, self._seconds, self._settings = directory, seconds, settings
        self._head = plain({"settings": settings.as_record(), "environment": environment()})
        self._saved, self._failed = time.monotonic(), False
        self.total = len(settings.optimizers) * len(settings.seeds) * settings.steps
        self.runs: dict[str, list[Run]] = {}
        self.compile_seconds: dict[str, float] = {}
        if (kept := self._checkpoints.read_extra()) is not None:
            if found := differences(kept["head"], self._head):
                raise CheckpointError(
                    f"{directory} holds another job ({'; '.join(found)}); choose another folder, or"
                    " its options"
                )
            self.runs = {k: [Run(**run) for run in runs] for k, runs in kept["runs"].items()}
            self.compile_seconds = kept["compile_seconds"]

    @property
    def step(self) -> int:
        """Number of steps taken, over all runs."""
        return sum(run.step[-1] for runs in self.runs.values() for run in runs)

    def restore(self, trainer: Trainer, seed: int) -> Carry:
        """Return weights and state of the unfinished run.

        Raises:
          CheckpointError: they are damaged or do not fit.
        """
        found = self._checkpoints.restore(_tree(trainer.start(seed)), trainer.table)
        assert found is not None
        return found.tree["weights"], found.tree["state"]

    def save(self, trainer: Trainer, carry: Carry) -> None:
        """Save the job when `seconds` have passed or at its end; the first failed save warns."""
        now, step = time.monotonic(), self.step
        if now < self._saved + self._seconds and step < self.total:
            return
        self._saved = now
        runs = {k: [dataclasses.asdict(run) for run in runs] for k, runs in self.runs.items()}
        extra = {"head": self._head, "runs": runs, "compile_seconds": self.compile_seconds}
        try:
            self._checkpoints.save(step, _tree(carry), trainer.table, extra)
        except CheckpointError as error:
            if not self._failed:
                print(f"\nwarning: {error}; training continues", file=sys.stderr)
            self._failed = True

    def __str__(self) -> str:
        self._checkpoints.manager.reload()
        newest = self._checkpoints.manager.latest_step()
        return f"{self._directory} holds {newest or 0} of {self.total} steps"


def _tree(carry: Carry) -> dict[str, Any]:
    return {"weights": carry[0], "state": carry[1]}
