"""Train a network with AdamW, Muon, hypersphere descent and manifold Muon, side by side.

`make train`, or `python -m studies.digits --help`. Shows a progress bar and a table, and writes a
figure and a record. The optimizers share initial weights, batches and their order.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from manifoldmuon.checkpoints import CheckpointError
from studies.datasets import DatasetError, FlatImages
from studies.digits import figure
from studies.digits.arguments import SUFFIXES, parse, parser
from studies.digits.checkpoint import JobCheckpoints
from studies.digits.gradients import record_gradients, save_gradients
from studies.digits.loop import Carry, Run, Trainer
from studies.digits.methods import METHODS
from studies.digits.settings import Settings
from studies.digits.summary import as_record, leads_over_adamw, summarise
from studies.digits.table import table
from studies.program import Parser, interrupted, progress
from studies.records import WriteError, write_record


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job.

    Args:
      argv: command line without the program's name; None for the process's arguments.

    Returns:
      The exit status. Wrong arguments and missing data exit with status 2.
    """
    p = parser()
    given = parse(argv, p)
    settings = given.settings
    try:
        data = load_all(settings)
    except DatasetError as error:
        p.error(str(error))
    first = data[settings.seeds[0]]
    if settings.batch_size > len(first.train_y):
        p.error(
            f"argument --batch-size: {settings.batch_size} is more than the {len(first.train_y)} "
            f"training images of {settings.data}"
        )
    kept = None if given.checkpoint is None else checkpoints(given, p)
    try:
        runs, compile_seconds = train_all(settings, data, kept)
    except KeyboardInterrupt:
        return interrupted(*([] if kept is None else [f"{kept}; the same command resumes"]))
    except CheckpointError as error:
        p.error(str(error))
    print(table(settings, summarise(settings, runs)))
    for name, ahead in leads_over_adamw(runs).items():
        print(f"{METHODS[name].label} against AdamW, seed by seed: {ahead.text('+.2f')} points")
    record = as_record(settings, first.widths(settings.widths), runs, compile_seconds)
    written: list[Path] = []
    try:
        for path in write(given, record, runs):
            written.append(path)
        if given.record_gradients is not None:
            recorded = record_gradients(settings.steps, settings.seeds[0], settings=settings)
            save_gradients(given.record_gradients, recorded)
            written.append(given.record_gradients)
    except WriteError as error:
        kept_too = "" if kept is None else f"; {kept}, and the same command writes the rest"
        print(f"error: {error}{kept_too}", file=sys.stderr)
        return 1
    finally:
        if written:
            print("written:", *written)
    return 0


def checkpoints(given: argparse.Namespace, p: Parser) -> JobCheckpoints:
    """Open this job's checkpoints in the folder `--checkpoint`, or exit with an error message."""
    try:
        kept = JobCheckpoints(given.checkpoint, given.checkpoint_every, given.settings)
    except CheckpointError as error:
        p.error(str(error))
    if kept.step == kept.total:
        print(f"{kept}: nothing is left to train")
    elif kept.step:
        print(f"{kept}: resuming there")
    return kept


def load_all(settings: Settings) -> dict[int, FlatImages]:
    """Load the data of every seed; data sets with a fixed split are loaded once."""
    if settings.data == "digits":
        return {seed: settings.load(seed) for seed in settings.seeds}
    return dict.fromkeys(settings.seeds, settings.load(settings.seeds[0]))


def train_all(
    settings: Settings, data: Mapping[int, FlatImages], kept: JobCheckpoints | None = None
) -> tuple[dict[str, list[Run]], dict[str, float]]:
    """Train every optimizer with every seed, with a progress bar; also return compile times.

    Raises:
      CheckpointError: a checkpoint is damaged, or does not fit.
    """
    runs = {} if kept is None else kept.runs
    compile_seconds = {} if kept is None else kept.compile_seconds
    total = len(settings.optimizers) * len(settings.seeds) * settings.steps
    done = 0 if kept is None else kept.step
    with progress(total, done) as bar:

        def report(trainer: Trainer, run: Run, steps: int, carry: Carry) -> None:
            bar.set_postfix_str(
                f"loss {run.train_loss[-1]:.4f}, test {100 * run.test_accuracy[-1]:.1f} %",
                refresh=False,
            )
            bar.update(steps)
            if kept is not None:
                kept.save(trainer, carry)

        for name in settings.optimizers:
            begun = runs.setdefault(name, [])
            if len(begun) == len(settings.seeds) and begun[-1].finished:
                continue
            label = METHODS[name].label
            bar.set_description(f"{label}, compiling")
            with bar.compiling():
                trainer = Trainer(settings, name, data[settings.seeds[0]])
            compile_seconds[name] = trainer.compile_seconds
            for place, seed in enumerate(settings.seeds):
                bar.set_description(f"{label}, seed {seed}", refresh=False)
                carry = None
                if place == len(begun):
                    begun.append(Run())
                elif begun[place].finished:
                    continue
                elif kept is not None:
                    carry = kept.restore(trainer, seed)
                run = begun[place]
                told = functools.partial(report, trainer, run)
                trainer.train(data[seed], seed, told, run, carry)
        bar.set_description("trained", refresh=False)
        bar.set_postfix_str("", refresh=False)
    return runs, compile_seconds


def write(
    given: argparse.Namespace, record: Mapping[str, object], runs: Mapping[str, Sequence[Run]]
) -> Iterator[Path]:
    """Write the record and the figure next to it; yield each path once it is written."""
    paths = [given.out / f"{name_of(given)}{suffix}" for suffix in SUFFIXES]
    yield write_record(paths[0], record, overwrite=given.overwrite)
    figure.save(figure.picture(given.settings, runs), paths[1])
    yield paths[1]


def name_of(given: argparse.Namespace) -> str:
    """Return the given name, or else the data set's name with the next free number."""
    if given.name is not None:
        return given.name
    number = 1
    while any((given.out / f"{given.settings.data}-{number:03d}{s}").exists()
              for s in SUFFIXES):  # fmt: skip
        number += 1
    return f"{given.settings.data}-{number:03d}"


if __name__ == "__main__":
    sys.exit(main())
