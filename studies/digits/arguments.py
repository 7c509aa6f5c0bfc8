"""The command line: an invalid option gives a one-line error before any work starts."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from studies.digits.methods import METHODS, PRESETS
from studies.digits.settings import Settings
from studies.program import Parser, integer, positive, refuse_twice
from studies.records import WriteError, check_writable


def parser() -> Parser:
    """Return the parser of `python -m studies.digits`."""
    default = Settings()
    seeds = " ".join(map(str, default.seeds))
    widths = " ".join(map(str, default.widths))
    rates = " ".join(f"{name}={method.learning_rate:g}" for name, method in METHODS.items())
    p = Parser(
        prog="python -m studies.digits",
        description="Trains a ReLU network with several optimizers, side by side.",
        allow_abbrev=False,
    )
    # fmt: off
    p.add_argument("--data", choices=["digits", "mnist", "cifar10"], default=default.data,
                   help="data set; the default, digits, needs no download")
    p.add_argument("--data-dir", type=Path, metavar="DIR",
                   help="folder with the files of mnist or cifar10 (default: download them)")
    p.add_argument("--widths", type=integer(1), nargs="+", default=default.widths, metavar="N",
                   help=f"widths of the hidden layers (default: {widths})")
    p.add_argument("--steps", type=integer(1), default=default.steps, metavar="N",
                   help="updates (default: %(default)s)")
    p.add_argument("--batch-size", type=integer(1), default=default.batch_size, metavar="N",
                   help="images per update (default: %(default)s)")
    p.add_argument("--optimizers", "--optimizer", nargs="+", choices=list(METHODS),
                   default=default.optimizers, metavar="NAME",
                   help=f"which to compare (default: {' '.join(METHODS)})")
    p.add_argument("--learning-rates", "--learning-rate", type=_rate, nargs="+", default=(),
                   metavar="[NAME=]RATE",
                   help=f"peak learning rate, of one optimizer or of all (default: {rates})")
    p.add_argument("--seeds", "--seed", type=integer(0), nargs="+", default=default.seeds,
                   metavar="N", help=f"one run for each (default: {seeds})")
    p.add_argument("--preset", choices=list(PRESETS), default=default.preset,
                   help="solver of manifold Muon (default: %(default)s)")
    p.add_argument("--multiplier", type=positive, default=default.multiplier, metavar="X",
                   help="fixed factor of the last layer: the Lipschitz bound of a network on the "
                   "Stiefel manifold (default: %(default)g)")
    p.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR",
                   help="folder for the record and the picture (default: %(default)s)")
    p.add_argument("--name", metavar="NAME",
                   help="of the two files (default: the data set and the next free number)")
    p.add_argument("--overwrite", action="store_true",
                   help="replace files that exist under that name")
    p.add_argument("--checkpoint", type=Path, metavar="DIR",
                   help="save the job into this folder, and go on with what it holds")
    p.add_argument("--checkpoint-every", type=_seconds, default=10.0, metavar="SECONDS",
                   help="between two checkpoints, at least (default: %(default)g)")
    p.add_argument("--record-gradients", type=Path, metavar="FILE.npz",
                   help="also write weights and gradients of manifold Muon, for benchmarks")
    # fmt: on
    return p


def parse(argv: Sequence[str] | None, p: Parser) -> argparse.Namespace:
    """Parse and check the command line; exit with status 2 on errors.

    Returns:
      The options by name, and `settings`, the settings of the training.
    """
    given = p.parse_args(argv)
    refuse_twice(p, given, "seeds", "optimizers")
    given.settings = Settings(
        data=given.data,
        data_dir=given.data_dir,
        widths=tuple(given.widths),
        steps=given.steps,
        batch_size=given.batch_size,
        optimizers=tuple(given.optimizers),
        learning_rates=_rates(given.learning_rates, given.optimizers, p),
        seeds=tuple(given.seeds),
        preset=given.preset,
        multiplier=given.multiplier,
    )
    _check_paths(given, p)
    return given


def _check_paths(given: argparse.Namespace, p: Parser) -> None:
    if given.data_dir is not None and given.data == "digits":
        p.error("argument --data-dir: the digits ship inside scikit-learn; choose --data mnist")
    if given.data_dir is not None and not given.data_dir.exists():
        p.error(f"argument --data-dir: there is no folder {given.data_dir}")
    if given.name is not None and (not given.name or Path(given.name).name != given.name):
        p.error(f"argument --name: {given.name!r} is not a file name; the folder goes into --out")
    gradients = given.record_gradients
    if gradients is not None and gradients.suffix != ".npz":
        p.error(f"argument --record-gradients: {gradients} does not end in .npz")
    targets = [] if given.name is None else [given.out / f"{given.name}{s}" for s in SUFFIXES]
    for path in [*targets, *([] if gradients is None else [gradients])]:
        if path.exists() and not given.overwrite:
            p.error(f"{path} exists; pass --overwrite, or choose another name")
    for folder in filter(None, (given.out, given.checkpoint, gradients and gradients.parent)):
        try:
            check_writable(folder)
        except WriteError as error:
            p.error(str(error))


SUFFIXES = (".json", ".png")


def _rates(
    given: Sequence[tuple[str | None, float]], optimizers: Sequence[str], p: Parser
) -> tuple[tuple[str, float], ...]:
    """Return the given rates by optimizer: a rate for all applies first, then specific rates."""
    rates = {name: rate for owner, rate in given if owner is None for name in optimizers}
    for owner, rate in given:
        if owner is not None and owner not in optimizers:
            p.error(
                f"argument --learning-rates: {owner!r} is not among the optimizers "
                f"({', '.join(optimizers)})"
            )
        if owner is not None:
            rates[owner] = rate
    return tuple(rates.items())


def _rate(text: str) -> tuple[str | None, float]:
    owner, separator, number = text.rpartition("=")
    return (owner if separator else None), positive(number)


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else positive(text)
