"""Kill a training repeatedly and compare its last checkpoint with an undisturbed run's.

    python -m benchmarks.kills      # five minutes; docs/benchmarks/results/kills.json

Trains a small network with manifold Muon, with a checkpoint after every chunk of steps. Alternate
kills hit while a checkpoint is being written and at a random time after a checkpoint. Each time
the same program resumes.
"""

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from benchmarks._command import command
from manifoldmuon.checkpoints import Checkpoints
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import manifold_muon, tabulate
from studies.classification import cross_entropy, init_weights
from studies.datasets import batches, load_digits, standardise
from studies.program import integer, parse, save
from studies.training import begin, train

CHUNK, BATCH = 15, 128
_TEMPORARY = ".orbax-checkpoint-tmp"


def job(folder: Path, chunks: int) -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    data, geometry = standardise(load_digits(0)), Stiefel()
    tx = manifold_muon(0.03, geometry)
    carry = begin(tx, init_weights(0, [(64, 64), (10, 64)]))
    table = tabulate(geometry, carry[0])
    order = batches(0, len(data.train_y), chunks * CHUNK, BATCH).reshape(chunks, CHUNK, BATCH)

    images, labels = jnp.asarray(data.train_x), jnp.asarray(data.train_y)

    @jax.jit
    def chunk(carry: Any, order: Any) -> Any:
        def loss(weights: Any, batch: Any) -> Any:
            return cross_entropy(weights, images[batch], labels[batch], 4.0)

        return train(tx, loss, carry, order)

    losses: list[float] = []
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    with Checkpoints(folder, options) as checkpoints:
        found = checkpoints.restore(dict(zip(("weights", "state"), carry, strict=True)), table)
        if found is not None:
            carry, losses = (found.tree["weights"], found.tree["state"]), found.extra
        for number in range(len(losses) // CHUNK, chunks):
            carry, (values, _) = chunk(carry, order[number])
            losses = [*losses, *values.tolist()]
            tree = dict(zip(("weights", "state"), carry, strict=True))
            checkpoints.save((number + 1) * CHUNK, tree, table, losses)


def main() -> int:
    """Run the job undisturbed and disturbed, write the record, and return 1 if they differ."""
    p = command("kills", "Kills and resumes a training, and compares its end to the undisturbed.")
    p.add_argument("--kills", type=integer(1), default=20, help="how many (default: %(default)s)")
    given = parse(p, None)
    chunks = 6 * given.kills
    with TemporaryDirectory() as folder:
        whole, other = Path(folder, "whole"), Path(folder, "killed")
        subprocess.run(line(whole, chunks), check=True)
        found = killed(other, given.kills, chunks, seed=0)
        subprocess.run(line(other, chunks), check=True)
        same = ending(whole) == ending(other)
    record = {
        "chunks": chunks,
        "kills": found,
        "resumes": len(found),
        "largest_loss_in_chunks": max(kill["lost"] for kill in found),
        "while_saving": sum(kill["saving"] for kill in found),
        "same_bits": same,
    }
    save(given, record)
    print({name: record[name] for name in record if name != "kills"})
    return 0 if same else 1


def line(folder: Path, chunks: int) -> list[str]:
    """Return the command line of the job."""
    code = f"from benchmarks.kills import *; job(Path({str(folder)!r}), {chunks})"
    return [sys.executable, "-c", code]


def killed(place: Path, kills: int, chunks: int, seed: int) -> list[dict[str, Any]]:
    """Start the job and kill it, repeatedly.

    Args:
      place: folder of the checkpoints.
      kills: number of kills; the first, third, ... hit while a checkpoint is being written.
      chunks: length of the job, which must outlast all kills.
      seed: seed of the times between checkpoint and kill.

    Returns:
      For each kill: `saved`, the newest complete step; `lost`, the number of later chunks trained,
      as visible in the folder; `saving`, whether a checkpoint was being written; `from`, the newest
      complete step when the process started.
    """
    moments, found = random.Random(seed), []
    for number in range(kills):
        during, begun = number % 2 == 0, max(steps(place), default=0)
        with process(line(place, chunks)) as trained:
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
def process(line: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process; kill it at the end of the block."""
    null = subprocess.DEVNULL
    with subprocess.Popen(line, stdout=null, stderr=null) as started:
        try:
            yield started
        finally:
            started.kill()


def steps(place: Path) -> list[int]:
    """Return the steps with complete checkpoints."""
    return [int(name) for name in _names(place) if name.isdecimal()]


def saving(place: Path) -> list[int]:
    """Return the steps with checkpoints being written, or interrupted by a kill."""
    names = [name.partition(_TEMPORARY) for name in _names(place)]
    return [int(step) for step, temporary, _ in names if temporary and step.isdecimal()]


def ending(place: Path) -> dict[str, Any]:
    """Return the newest step, its array digests, and all losses."""
    record = json.loads((place / str(max(steps(place))) / "record" / "metadata").read_text())
    return {"step": max(steps(place)), "digests": record["digests"], "losses": record["extra"]}


def _names(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()] if place.is_dir() else []


if __name__ == "__main__":
    sys.exit(main())
