"""Run a trainer's own loop under four optimizers: whole, killed and resumed, on eight devices.

Every trainer's file has a function `train(run)`: it starts the trainer's own loop with the
`optimizer` of that name, saves the trainer's own checkpoint every `run.save_every` steps, and
reports each step's loss to `run.report`. `main(train)` is the command line.
"""

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import optax

import manifoldmuon as mm
from manifoldmuon.manifolds import Hypersphere, Manifold, Stiefel

RATES = {"optax": 0.02, "drop-in": 0.02, "muonh": 1 / 32, "stiefel": 0.05}
DISTRIBUTIONS = {
    "easydel": "easydel",
    "kauldron": "kauldron",
    "levanter": "marin-levanter",
    "maxtext": "maxtext",
    "nnx": "flax grain orbax-checkpoint",
    "tunix": "google-tunix",
}
_MATRICES: dict[str, Manifold] = {"muonh": Hypersphere(ndim=2), "stiefel": Stiefel()}


def optimizer(
    name: str,
    rate: Any,
    geometry: Callable[[Manifold], Any],
    rest: optax.GradientTransformation,
    **muon: Any,
) -> optax.GradientTransformation:
    """Return an optimizer by name.

    Args:
      name: "optax" (Optax's Muon), "drop-in", "muonh" or "stiefel".
      rate: the learning rate, or a schedule.
      geometry: function of the manifold of every matrix; returns the geometry, with None for the
        parameters of `rest`.
      rest: optimizer of the other parameters.
      muon: arguments of Optax's Muon and the drop-in.
    """
    if name in ("optax", "drop-in"):
        return (optax.contrib.muon if name == "optax" else mm.optim.optax_muon)(rate, **muon)
    spaces = geometry(_MATRICES[name])
    if name == "muonh":
        return mm.optim.muonh(rate, spaces, rest=rest)
    # The trainer makes the weights: the first update moves them to their manifolds.
    return mm.optim.start_on(mm.optim.manifold_muon(rate, spaces, rest=rest), spaces)


def text(length: int) -> np.ndarray:
    """Return rows of a text, a byte below 128 a token: the license of this project."""
    tokens = np.frombuffer((Path(__file__).parents[2] / "LICENSE").read_bytes(), np.uint8)
    return tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run in a process of its own.

    Attributes:
      name: name of the optimizer.
      folder: folder of checkpoints and losses.
      steps: number of steps of training.
      kill_at: step at which the process kills itself (the first is 0); None: never.
      save_every: steps between checkpoints.
    """

    name: str
    folder: Path
    steps: int = 60
    kill_at: int | None = None
    save_every: int = 10

    @property
    def rate(self) -> float:
        """Return the peak of the learning rate."""
        return RATES[self.name]

    def report(self, step: int, loss: Any) -> None:
        """Record the loss of a step (the first is 0), and kill the process at step `kill_at`."""
        with (self.folder / "losses.jsonl").open("a", encoding="utf-8") as file:
            print(json.dumps([int(step), float(loss)]), file=file)
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def report_distance(self, geometry: Callable[[Manifold], Any], params: Any) -> None:
        """Record the largest distance of the trained weights from their manifolds."""
        if self.name == "stiefel":
            distances = mm.optim.monitor_distance(geometry(_MATRICES[self.name]), params)
            far = max(map(float, distances.values()))
            (self.folder / "distance.json").write_text(json.dumps(far), encoding="utf-8")


def main(train: Callable[[Run], None], argv: Sequence[str] | None = None) -> int:
    """Run the command line of a trainer's file: print figures; return the number of bad rows.

    `optax`, `resumed` and `devices` are the largest differences of losses, as shares of the first.
    """
    parser = argparse.ArgumentParser(description="Run a trainer's loop with each optimizer.")
    parser.add_argument("--only", choices=RATES, nargs="+", default=[*RATES], help="optimizers")
    parser.add_argument("--steps", type=int, default=60, help="steps of training, 60 by default")
    parser.add_argument("--devices", type=int, default=8, help="of the mesh; 1: leave it out")
    parser.add_argument("--save", type=Path, help="write the figures to this file, as JSON")
    parser.add_argument("--folder", type=Path, help="run one optimizer in this folder, here")
    parser.add_argument("--kill-at", type=int, help="with --folder: kill the process at this step")
    options = parser.parse_args(argv)
    if min(options.steps, options.devices) < 1 or not (options.save or Path()).parent.is_dir():
        parser.error("--steps and --devices must be at least 1, the folder of --save must exist")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        train(Run(options.only[0], options.folder, options.steps, options.kill_at))
        return 0
    spec: Any = sys.modules[train.__module__].__spec__
    names = *DISTRIBUTIONS[spec.name.rpartition(".")[2]].split(), "jax", "optax", "manifoldmuon"
    versions = {x: metadata.version(x) for x in names} | {"Python": platform.python_version()}
    print(", ".join(map(" ".join, versions.items())), flush=True)
    start, wrong, rows, muon = os.times(), 0, {}, None
    for name in options.only:
        command = [sys.executable, "-m", spec.name, "--steps", str(options.steps), "--only", name]
        with tempfile.TemporaryDirectory() as folder:
            losses, row = _compare(command, Path(folder), options, only_whole=name == "optax")
        muon = losses if name == "optax" else muon
        if muon and name == "drop-in":
            row["optax"] = _apart(muon, losses)
        rows[name] = row
        print(f"{name}:", ", ".join(f"{x} {value:.3g}" for x, value in row.items()), flush=True)
        limits = {"optax": 1e-3, "resumed": 0, "devices": 1e-2, "distance": 1e-4}
        limits["last"] = 0.9 * row["first"]
        wrong += not all(row.get(x, 0) <= most for x, most in limits.items())
    if options.save:
        user, system, wall = np.subtract(os.times(), start).round()[2:]
        record: Any = {"versions": versions, "steps": options.steps, "devices": options.devices}
        record |= {"seconds": {"wall": wall, "cpu": user + system}, "optimizers": rows}
        options.save.write_text(f"{json.dumps(record, indent=2)}\n", encoding="utf-8")
    return wrong


def _compare(
    command: list[str], folder: Path, options: argparse.Namespace, only_whole: bool
) -> tuple[dict[int, float], dict[str, float]]:
    """Return the losses of a whole run, and the differences of the other runs from it."""
    losses = _losses(command, folder / "whole")
    row = {"first": losses[0], "last": losses[options.steps - 1]}
    if (distance := folder / "whole" / "distance.json").exists():
        row["distance"] = json.loads(distance.read_bytes())
    if only_whole:
        return losses, row
    # Asynchronous checkpoints: the last may be unfinished, those before it are not.
    kill_at = options.steps * 3 // 4
    killed = _losses([*command, "--kill-at", str(kill_at)], folder / "killed", -signal.SIGKILL)
    (folder / "killed" / "losses.jsonl").unlink()
    resumed = _losses(command, folder / "killed")
    if max(killed) != kill_at or not 0 < min(resumed) <= kill_at:
        raise RuntimeError(f"killed at step {max(killed)}, resumed from step {min(resumed)}")
    row["resumed"] = _apart(losses, killed | resumed)
    if options.devices > 1:
        row["devices"] = _apart(losses, _losses(command, folder / "mesh", devices=options.devices))
    return losses, row


def _apart(first: dict[int, float], second: dict[int, float]) -> float:
    """Return the largest difference, as a share of the first loss; the steps must be the same."""
    if set(first) != set(second):
        raise RuntimeError(f"steps {sorted(set(first) ^ set(second))} are in one run only")
    return max(abs(first[k] - second[k]) for k in first) / abs(first[0])


def _losses(
    command: list[str], folder: Path, status: int = 0, devices: int = 1
) -> dict[int, float]:
    """Run a command in a process; return the losses by step."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    # With few threads, devices that wait in different collectives can deadlock.
    threads = {"NPROC": "64"} if devices > 1 else {}
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | threads,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return dict(map(json.loads, (folder / "losses.jsonl").read_bytes().splitlines()))
