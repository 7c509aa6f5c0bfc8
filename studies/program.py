"""Common parts of the command lines of studies and benchmarks."""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from studies.records import WriteError, environment, write_record

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in a shell."""


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors, without the usage text, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (--help lists the options)\n")


def command(module: str, description: str, folder: Path, record: str | None = None) -> Parser:
    """Create a parser with the options of every benchmark.

    Args:
      module: the name after `python -m`.
      description: a line for `--help`.
      folder: the default folder of the record.
      record: the name of the record; None takes the last part of the module name.
    """
    p = Parser(prog=f"python -m {module}", description=description, allow_abbrev=False)
    path = folder / f"{record or module.rpartition('.')[2]}.json"
    p.add_argument("--out", type=Path, default=path, metavar="FILE",
                   help="the record to write (default: %(default)s)")  # fmt: skip
    p.add_argument("--overwrite", action="store_true", help="replace a record that exists")
    return p


def parse(
    p: Parser, argv: Sequence[str] | None, resumes: bool = False, beside: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse the command line; exit if the output cannot be written.

    Args:
      p: the options.
      argv: the command line without the program's name; None reads the command line of the
        process.
      resumes: whether the program completes an existing record.
      beside: suffixes of further output files with the record's name.
    """
    given = p.parse_args(argv)
    if given.out.suffix != ".json":
        p.error(f"argument --out must end in .json; got {given.out}")
    for path in (given.out, *map(given.out.with_suffix, beside)):
        if path.exists() and not (given.overwrite or resumes):
            p.error(f"{path} exists; pass --overwrite, or choose another name with --out")
    folder = given.out.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(256))
    except OSError as error:
        p.error(str(WriteError(folder, error)))
    return given


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
