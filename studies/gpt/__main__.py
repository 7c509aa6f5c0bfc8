"""Hello, GPT: a character model of Shakespeare, trained as published or on manifolds.

    python -m studies.gpt --data-dir DIR                           # the published protocol
    python -m studies.gpt --data-dir DIR --optimizer constrained   # weights on manifolds

Without a folder the text is Python's help topics. Writes a record, a figure and text samples.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from studies.datasets import DatasetError
from studies.digits import figure
from studies.gpt import report, texts
from studies.gpt.methods import METHODS
from studies.gpt.sampling import sample
from studies.gpt.settings import Settings
from studies.gpt.training import Run, Trainer
from studies.program import (
    Parser,
    command,
    errors_in_one_line,
    integer,
    interrupted,
    parse,
    positive,
    progress,
    refuse_twice,
    save,
)
from studies.records import whole


def main(argv: Sequence[str] | None = None) -> int:
    """Train once for each seed.

    Args:
      argv: command line without the program's name; None for the process's arguments.

    Returns:
      The exit status. Wrong arguments and missing data exit with status 2.
    """
    p = options()
    given = parse(p, argv, resumes=True)
    refuse_twice(p, given, "seeds")
    if given.width % (2 * given.heads):
        p.error(
            f"argument --width: {given.width} is not an even multiple of the {given.heads} heads"
        )
    chosen: dict[str, Any] = {
        field.name: getattr(given, field.name) for field in dataclasses.fields(Settings)
    }
    chosen["seeds"] = tuple(given.seeds)
    settings = Settings(**chosen)
    try:
        text = texts.load(given.data_dir)
    except DatasetError as error:
        p.error(str(error))
    if min(len(text.train), len(text.validation)) <= settings.context:
        p.error(f"the text is too short: both of its parts need {settings.context + 1} characters")
    runs = [] if given.overwrite else earlier_runs(p, given.out, settings, text)
    try:
        train_all(given, settings, text, runs)
    except KeyboardInterrupt:
        return interrupted(f"{len(runs)} of {len(settings.seeds)} runs are in {given.out}")
    print(report.table(settings, text, runs))
    print(f"\n{runs[0].sample}\n")
    write(given, settings, text, runs)
    return 0


def earlier_runs(p: Parser, path: Path, settings: Settings, text: texts.Text) -> list[Run]:
    """Return the runs of an existing record; exit if its protocol differs."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    same = settings.as_record() | {"seeds": record.get("settings", {}).get("seeds")}
    if record.get("settings") != same or record.get("text") != text.name:
        p.error(f"{path} is of another protocol; pass --overwrite, or another --out")
    return [run for run in report.from_record(record) if run.seed in settings.seeds]


def write(
    given: argparse.Namespace, settings: Settings, text: texts.Text, runs: Sequence[Run]
) -> None:
    """Write the record, and next to it the figure and the samples."""
    picture, samples = (given.out.with_suffix(suffix) for suffix in (".png", ".txt"))
    save(given, report.as_record(settings, text, runs), replace=True)
    with errors_in_one_line():
        figure.save(report.picture(settings, text, runs), picture)
        with whole(samples) as temporary:
            temporary.write_text("\n\n".join(run.sample for run in runs) + "\n", encoding="utf-8")


def options() -> Parser:
    """Return the parser of `python -m studies.gpt`."""
    default = Settings()
    p = command(
        "studies.gpt", "Trains a character GPT and samples text from it.", record="hello_gpt"
    )
    # fmt: off
    p.add_argument("--data-dir", type=Path, metavar="DIR",
                   help="folder with tinyshakespeare.txt (default: Python's help topics)")
    p.add_argument("--optimizer", choices=list(METHODS), default=default.optimizer,
                   help="default: %(default)s")
    p.add_argument("--learning-rate", type=positive, metavar="RATE",
                   help="the peak; it falls linearly to zero (default: the optimizer's own)")
    p.add_argument("--steps", type=integer(1), default=default.steps, metavar="N",
                   help="updates (default: %(default)s)")
    p.add_argument("--batch", type=integer(1), default=default.batch, metavar="N",
                   help="windows per update (default: %(default)s)")
    p.add_argument("--context", type=integer(1), default=default.context, metavar="N",
                   help="characters per window (default: %(default)s)")
    p.add_argument("--width", type=integer(1), default=default.width, metavar="N",
                   help="of the residual stream (default: %(default)s)")
    p.add_argument("--heads", type=integer(1), default=default.heads, metavar="N",
                   help="of attention (default: %(default)s)")
    p.add_argument("--blocks", type=integer(1), default=default.blocks, metavar="N",
                   help="of the network (default: %(default)s)")
    p.add_argument("--seeds", "--seed", type=integer(0), nargs="+", default=default.seeds,
                   metavar="N", help="one run for each (default: 0 1 2)")
    p.add_argument("--sample", type=integer(1), default=500, metavar="N",
                   help="characters to draw from each trained network (default: %(default)s)")
    p.add_argument("--temperature", type=positive, default=0.8, metavar="T",
                   help="of the draws: below 1 for likelier characters (default: %(default)s)")
    # fmt: on
    return p


def train_all(
    given: argparse.Namespace, settings: Settings, text: texts.Text, runs: list[Run]
) -> None:
    """Train the missing seeds; write the record after each."""
    trainer = Trainer(settings, text)
    missing = [seed for seed in settings.seeds if seed not in [run.seed for run in runs]]
    with progress(len(missing) * settings.steps) as bar:

        def report(run: Run, steps: int) -> None:
            bar.set_description(f"seed {run.seed}", refresh=False)
            bar.set_postfix_str(f"loss {run.late_train_loss:.4f}", refresh=False)
            bar.update(steps)

        for seed in missing:
            run, weights = trainer.train(seed, report)
            prompt = jnp.asarray(text.validation[: settings.context])
            tokens = sample(
                trainer.job.network, weights, jax.random.key(seed), prompt, settings.context,
                given.sample, given.temperature,
            )  # fmt: skip
            run.sample = text.decode(np.asarray(tokens))
            runs.append(run)
            runs.sort(key=lambda run: settings.seeds.index(run.seed))
            write(given, settings, text, runs)


if __name__ == "__main__":
    sys.exit(main())
