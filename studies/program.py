"""Common parts of the command lines: a record, its folder, a progress bar."""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from studies.datasets import Dataset, DatasetError
from studies.records import WriteError, check_writable, environment, write_record

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in a shell."""


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors, without the usage text, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (--help lists the options)\n")


def command(
    module: str,
    description: str,
    data: str | None = None,
    *,
    folder: Path = Path("runs"),
    record: str | None = None,
) -> Parser:
    """Create a parser with the options of every program and benchmark.

    Args:
      module: the name after `python -m`.
      description: a line for `--help`.
      data: the data set in the folder `--data-dir`; None for programs without data.
      folder: the default folder of the record.
      record: the name of the record; None takes the last part of the module name.
    """
    p = Parser(prog=f"python -m {module}", description=description, allow_abbrev=False)
    name = record or module.rpartition(".")[2]
    p.add_argument("--out", type=Path, default=folder / f"{name}.json", metavar="FILE",
                   help="the record to write (default: %(default)s)")  # fmt: skip
    p.add_argument("--overwrite", action="store_true", help="replace a record that exists")
    if data is not None:
        p.add_argument("--data-dir", type=Path, metavar="DIR",
                       help=f"folder with the files of {data} (default: download)")  # fmt: skip
    return p


def parse(
    p: Parser, argv: Sequence[str] | None, resumes: bool = False, beside: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse the command line; exit if a later step would fail: missing data, unwritable output.

    Args:
      p: the options.
      argv: the command line without the program's name; None reads the command line of the
        process.
      resumes: whether the program completes an existing record.
      beside: suffixes of further output files with the record's name.
    """
    given = p.parse_args(argv)
    if given.out.suffix != ".json":
        p.error(f"argument --out: {given.out} does not end in .json")
    for path in (given.out, *map(given.out.with_suffix, beside)):
        if path.exists() and not (given.overwrite or resumes):
            p.error(f"{path} exists; pass --overwrite, or another --out")
    folder = getattr(given, "data_dir", None)
    if folder is not None and not folder.exists():
        p.error(f"argument --data-dir: there is no folder {folder}")
    try:
        check_writable(given.out.parent)
    except WriteError as error:
        p.error(str(error))
    return given


def load(p: Parser, loader: Callable[[Path | None], Dataset], folder: Path | None) -> Dataset:
    """Load the data set, or exit with advice, in a single line."""
    try:
        return loader(folder)
    except DatasetError as error:
        p.error(str(error))


class Progress(tqdm):
    """A progress bar that excludes compilation from its rate and remaining time.

    The first chunk of steps, mostly compilation, counts as done but is not timed; there is no rate
    before it is done. `compiling` excludes later compilations.
    """

    timed = False

    def update(self, n: float | int | None = 1) -> bool | None:
        if self.timed:
            return super().update(n)
        self.timed = True
        self.n += n or 0
        self.initial = self.last_print_n = self.n
        self.unpause()
        return self.refresh()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Exclude the time of the block."""
        begun = time.time()
        yield
        spent = time.time() - begun
        self.start_t += spent
        self.last_print_t += spent


def progress(total: int, done: int = 0) -> Progress:
    """Create a bar over steps. In a log file every refresh is a line, so it refreshes rarely."""
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return Progress(total=total, initial=done, unit="step", dynamic_ncols=True, mininterval=pause)


def save(given: argparse.Namespace, record: Mapping[str, Any], replace: bool = False) -> None:
    """Write the record and its environment; `replace` if this run has written it before.

    Exit with a one-line error if the disk is full or read-only.
    """
    whole = {"environment": environment(), **record}
    with errors_in_one_line():
        write_record(given.out, whole, overwrite=given.overwrite or replace)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with a one-line error if a file cannot be written."""
    try:
        yield
    except WriteError as error:
        sys.exit(f"error: {error}")


def interrupted(kept: str = "nothing was written") -> int:
    """Report the interruption and return the exit status."""
    print(f"\ninterrupted; {kept}", file=sys.stderr)
    return INTERRUPTED


def refuse_twice(p: Parser, given: argparse.Namespace, *names: str) -> None:
    """Exit if one of these options repeats a value."""
    for name in names:
        values = getattr(given, name)
        if twice := sorted({str(value) for value in values if values.count(value) > 1}):
            option = name.replace("_", "-")
            p.error(f"argument --{option}: {', '.join(twice)} given more than once")


def positive(text: str) -> float:
    """Parse a positive, finite number, for `type=`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def integer(least: int) -> Callable[[str], int]:
    """Return a parser of integers from `least` to 2^31 - 1, for `type=`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
        return number

    return convert
