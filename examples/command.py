"""What the command lines share: a record, its folder, a progress bar."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.digits.arguments import Parser
from studies.datasets import Dataset, DatasetError
from studies.records import WriteError, check_writable, environment, write_record

INTERRUPTED = 130
"""The exit status after Ctrl-C, as of a shell."""


def command(
    name: str,
    description: str,
    data: str | None = None,
    *,
    package: str = "examples",
    folder: Path = Path("runs"),
) -> Parser:
    """The options that every example and benchmark has.

    Args:
      name: of the module, and of the record that it writes.
      description: one line, for `--help`.
      data: what `--data-dir` is a folder of; None if no data set is read.
      package: of the module.
      folder: of the record, unless another is given.
    """
    p = Parser(prog=f"python -m {package}.{name}", description=description, allow_abbrev=False)
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
    """Reads the command line, and refuses before any work what would fail after it.

    Args:
      p: the options.
      argv: the command line without the program's name; None for that of the process.
      resumes: whether the example goes on with a record that exists.
      beside: endings of the other files that are written, named as the record.
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
    """The data set, or an end with one line that says what to do."""
    try:
        return loader(folder)
    except DatasetError as error:
        p.error(str(error))


def progress(total: int) -> tqdm:
    """A bar over steps; in a file it is one line after another, and so seldom."""
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=pause)


def save(given: argparse.Namespace, record: Mapping[str, Any], replace: bool = False) -> None:
    """Writes the record with what it ran on; `replace` if this run has written it before.

    A disk that is full or read-only ends the program with one line.
    """
    whole = {"environment": environment(), **record}
    with told():
        write_record(given.out, whole, overwrite=given.overwrite or replace)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Ends the program with one line where a file cannot be written."""
    try:
        yield
    except WriteError as error:
        sys.exit(f"error: {error}")


def interrupted(kept: str = "nothing was written") -> int:
    """Says so, and returns the exit status."""
    print(f"\ninterrupted; {kept}", file=sys.stderr)
    return INTERRUPTED
