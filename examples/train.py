"""Trains a network with AdamW, Muon, hypersphere descent and manifold Muon, side by side.

`make train`, or `python -m examples.train --help`: a progress bar, a table, a picture and a
record. The optimizers start from the same weights and see the same batches in the same order.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from examples.command import interrupted
from examples.digits import figure
from examples.digits.arguments import SUFFIXES, Arguments, parse, parser
from examples.digits.gradients import record_gradients, save_gradients
from examples.digits.loop import Run, Trainer
from examples.digits.methods import METHODS
from examples.digits.settings import Settings
from examples.digits.summary import as_record, leads_over_adamw, summarise
from examples.digits.table import table
from studies.datasets import DatasetError, FlatImages
from studies.records import write_record


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job.

    Args:
      argv: the command line without the program's name; None for that of the process.

    Returns:
      The exit status. Wrong arguments and missing data end the program with status 2.
    """
    p = parser()
    arguments = parse(argv, p)
    settings = arguments.settings
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
    try:
        runs, compile_seconds = train_all(settings, data)
    except KeyboardInterrupt:
        return interrupted()
    print(table(settings, summarise(settings, runs)))
    for name, ahead in leads_over_adamw(runs).items():
        print(f"{METHODS[name].label} against AdamW, seed by seed: {ahead.text('+.2f')} points")
    record = as_record(settings, first.widths(settings.widths), runs, compile_seconds)
    written = write(arguments, record, runs)
    if arguments.gradients is not None:
        recorded = record_gradients(settings.steps, settings.seeds[0], settings=settings)
        save_gradients(arguments.gradients, recorded)
        written.append(arguments.gradients)
    print("written:", *written)
    return 0


def load_all(settings: Settings) -> dict[int, FlatImages]:
    """The data of every seed; those that have one split are loaded once."""
    if settings.data == "digits":
        return {seed: settings.load(seed) for seed in settings.seeds}
    return dict.fromkeys(settings.seeds, settings.load(settings.seeds[0]))


def train_all(
    settings: Settings, data: Mapping[int, FlatImages]
) -> tuple[dict[str, list[Run]], dict[str, float]]:
    """Every optimizer with every seed, under one progress bar; and what compiling took."""
    runs: dict[str, list[Run]] = {}
    compile_seconds = {}
    total = len(settings.optimizers) * len(settings.seeds) * settings.steps
    # In a file a bar is one line after another: seldom, there.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=pause) as bar:

        def report(run: Run, steps: int) -> None:
            bar.set_postfix_str(
                f"loss {run.train_loss[-1]:.4f}, test {100 * run.test_accuracy[-1]:.1f} %",
                refresh=False,
            )
            bar.update(steps)

        for name in settings.optimizers:
            label = METHODS[name].label
            bar.set_description(f"{label}, compiling")
            trainer = Trainer(settings, name, data[settings.seeds[0]])
            compile_seconds[name] = trainer.compile_seconds
            runs[name] = []
            for seed in settings.seeds:
                bar.set_description(f"{label}, seed {seed}", refresh=False)
                runs[name].append(trainer.train(data[seed], seed, report))
        bar.set_description("trained", refresh=False)
        bar.set_postfix_str("", refresh=False)
    return runs, compile_seconds


def write(
    arguments: Arguments, record: Mapping[str, object], runs: Mapping[str, Sequence[Run]]
) -> list[Path]:
    """Writes the record and, beside it, the picture; returns where."""
    paths = [arguments.out / f"{name_of(arguments)}{suffix}" for suffix in SUFFIXES]
    write_record(paths[0], record, overwrite=arguments.overwrite)
    figure.save(figure.picture(arguments.settings, runs), paths[1])
    return paths


def name_of(arguments: Arguments) -> str:
    """The name that was asked for, or the data set's with the next free number."""
    if arguments.name is not None:
        return arguments.name
    number = 1
    while any((arguments.out / f"{arguments.settings.data}-{number:03d}{s}").exists()
              for s in SUFFIXES):  # fmt: skip
        number += 1
    return f"{arguments.settings.data}-{number:03d}"


if __name__ == "__main__":
    sys.exit(main())
