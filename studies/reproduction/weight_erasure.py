"""Weight erasure: which method overwrites its initial weights, and which leaves them readable?

The middle matrix of an MLP is multiplied by a mask that is zero on the letter "a", and the
network is trained on CIFAR-10. Dualized updates have a high stable rank and overwrite the letter;
gradients scaled to the same spectral norm have rank one, and leave it. Every run saves checkpoints
and resumes after an interruption.

    python -m studies.reproduction.weight_erasure --data-dir DIR --runs dualized:0.5 gradient:0.5
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from studies.datasets import Dataset, load_cifar10
from studies.program import command, interrupted, load, parse, positive, progress, save
from studies.program import integer as whole
from studies.reproduction import modula
from studies.reproduction.erasure import BATCH, METHODS, MIDDLE, SAMPLED, Problem, stable_ranks

RUNS = ("dualized:0.5", "gradient:0.5", "dualized:2")
WIDTHS = (32, 128, 1024)
CHUNK = 50


class Which(NamedTuple):
    """Options of a run: method, learning rate, and whether batches come from all images."""

    name: str
    method: str
    learning_rate: float
    everywhere: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything missing in the record; return the exit status."""
    p = command(
        "studies.reproduction.weight_erasure",
        "Which method writes over its initial weights?",
        "cifar10",
    )
    p.add_argument("--runs", type=which, nargs="*", default=[which(run) for run in RUNS],
                   metavar="METHOD:RATE[:all]", help="dualized or gradient, with a learning rate; "
                   "'all': batches from the whole training part, not from its first "
                   f"{SAMPLED} images (default: {' '.join(RUNS)})")  # fmt: skip
    p.add_argument("--widths", type=whole(8), nargs="*", default=list(WIDTHS), metavar="N",
                   help="whose stable ranks are measured (default: 32 128 1024)")  # fmt: skip
    p.add_argument("--width", type=whole(8), default=1024, metavar="N",
                   help="of the runs (default: %(default)s)")  # fmt: skip
    p.add_argument("--steps", type=whole(1), default=1001, metavar="N",
                   help="of a run (default: %(default)s)")  # fmt: skip
    given = parse(p, argv, resumes=True)
    dataset = load(p, load_cifar10, given.data_dir)
    settings = {
        "width": given.width,
        "steps": given.steps,
        "batch": BATCH,
        "sampled": SAMPLED,
        "images": len(dataset.train_y),
    }
    record: dict[str, Any] = {"settings": settings, "stable_ranks": [], "runs": {}}
    if given.out.exists() and not given.overwrite:
        old = json.loads(given.out.read_text(encoding="utf-8"))
        if old["settings"] != settings:
            p.error(f"{given.out} is of other settings; pass --overwrite, or another --out")
        record |= {key: old[key] for key in ("stable_ranks", "runs")}
    try:
        complete(given, record, dataset)
    except KeyboardInterrupt:
        return interrupted("what was done is kept; the same command resumes")
    print("written:", given.out)
    return 0


def complete(given: argparse.Namespace, record: dict[str, Any], dataset: Dataset) -> None:
    """Measure and train everything missing in the record; write the record after each piece."""
    for width in given.widths:
        if all(row["width"] != width for row in record["stable_ranks"]):
            record["stable_ranks"] += stable_ranks(dataset, width, steps=10)
            save(given, record, replace=True)
    for run in given.runs:
        if record["runs"].get(run.name, {"step": [0]})["step"][-1] < given.steps:
            for curves in train(run, dataset, given):
                record["runs"][run.name] = curves
                save(given, record, replace=True)


def train(
    run: Which, dataset: Dataset, given: argparse.Namespace
) -> Generator[dict[str, list[Any]]]:
    """Train a run from its last checkpoint, if any; yield the growing curves."""
    sampled = len(dataset.train_y) if run.everywhere else SAMPLED
    problem = Problem(dataset, given.width, modula.SIX_STEPS, sampled)
    tx = problem.transformation(run.method, run.learning_rate)

    @jax.jit
    def chunk(carry: Any, steps, train):
        def step(carry, t):
            params, state, _ = carry
            grads = problem.grad(params, jax.random.fold_in(jax.random.key(1), t), train)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state, middle(updates)), None

        return jax.lax.scan(step, carry, steps)[0]

    carry: Any = (problem.params, tx.init(problem.params), problem.params[MIDDLE])
    checkpoint = given.out.with_name(f".{given.out.stem}-{run.name.replace(':', '-')}.npz")
    if checkpoint.exists() and not given.overwrite:
        carry, curves = restore(checkpoint, carry)
    else:
        curves = begin(problem.measure(carry[0], None))
    yield curves
    with progress(given.steps) as bar:
        bar.set_description(run.name)
        bar.update(curves["step"][-1])
        while (done := curves["step"][-1]) < given.steps:
            steps = np.arange(done, min(done + CHUNK, given.steps))
            carry = chunk(carry, steps, problem.train)
            curves["step"].append(done + len(steps))
            for name, value in problem.measure(carry[0], carry[2]).items():
                curves[name].append(value)
            store(checkpoint, carry, curves)
            yield curves
            bar.set_postfix_str(
                f"train {100 * curves['train_accuracy'][-1]:.1f} %, letter's AUC "
                f"{curves['auc'][-1] or np.nan:.3f}"
            )
            bar.update(len(steps))
    checkpoint.unlink(missing_ok=True)


def begin(measured: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the curves before the first step."""
    return {"step": [0]} | {name: [value] for name, value in measured.items()}


def middle(updates: Any) -> Any:
    """Return the middle matrix of a tree with the parameters' structure."""
    return updates[MIDDLE]


def store(path: Path, carry: Any, curves: dict[str, list[Any]]) -> None:
    """Write a checkpoint atomically."""
    arrays: dict[str, Any] = {
        f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(carry))
    }
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
        np.savez(file, curves=np.array(json.dumps(curves)), **arrays)
    Path(file.name).replace(path)


def restore(path: Path, carry: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Read a checkpoint written by `store`, in the structure of `carry`."""
    with np.load(path) as file:
        leaves = [file[f"leaf{i}"] for i in range(len(jax.tree.leaves(carry)))]
        curves = json.loads(str(file["curves"]))
    return jax.tree.unflatten(jax.tree.structure(carry), leaves), curves


def which(text: str) -> Which:
    """Parse a run's name, such as `dualized:0.5` or `dualized:0.5:all`."""
    method, _, rest = text.partition(":")
    rate, separator, everywhere = rest.partition(":")
    if method not in METHODS or (separator and everywhere != "all"):
        raise argparse.ArgumentTypeError(f"{text!r} is not METHOD:RATE or METHOD:RATE:all")
    return Which(text, method, positive(rate), bool(separator))


if __name__ == "__main__":
    sys.exit(main())
