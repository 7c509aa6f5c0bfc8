"""Table of published and reproduced numbers.

    python -m studies.reproduction --data-dir DIR                # runs what has no record yet
    python -m studies.reproduction --table                       # of the records that are there
    python -m studies.reproduction --only hello_world --rerun

Records are kept in `studies/results`; an interrupted run keeps its finished parts. The table is
also written there, as Markdown, for the documentation.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from studies.program import INTERRUPTED, Parser, errors_in_one_line
from studies.records import WriteError, check_writable, whole
from studies.reproduction.rows import CHAPTERS, NARROW, SHORT, Record, markdown, text

RESULTS = Path(__file__).parents[1] / "results"
TABLE = "reproduction.md"


class Job(NamedTuple):
    """Program and data that make a record.

    Attributes:
      data: patterns of the data files below the data folder, the preferred pattern first; empty if
        no data is needed.
      downloads: whether the program can run without the data folder.
      resumes: whether the program completes a partial record.
      module: module in `studies.reproduction`, or full module name; None for the record's name.
      options: options of the program.
    """

    data: tuple[str, ...] = ()
    downloads: bool = True
    resumes: bool = False
    module: str | None = None
    options: tuple[str, ...] = ()


CIFAR = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar-10-*.tar.gz")
GPT = "studies.gpt"
JOBS = {
    "hello_world": Job(),
    "hello_mnist": Job(("mnist", "train-images-idx3-ubyte*")),
    "hello_gpt": Job(("tinyshakespeare.txt",), False, True, GPT),
    "hello_gpt-constrained": Job(
        ("tinyshakespeare.txt",), False, True, GPT, ("--optimizer", "constrained")
    ),
    "hello_gpt-bounded": Job(
        ("tinyshakespeare.txt",), False, True, GPT, ("--optimizer", "bounded")
    ),
    "manifold_cifar": Job(CIFAR),
    "agd_cifar10": Job(CIFAR, module="studies.step_lengths.agd", options=SHORT),
    "weight_erasure": Job(CIFAR, resumes=True),
    "weight_erasure_256": Job(CIFAR, True, True, "weight_erasure", NARROW),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing examples and print the table; return the exit status."""
    p = options()
    given = p.parse_args(argv)
    if given.table and given.rerun:
        p.error("argument --table: it runs nothing, and --rerun runs everything; give one of them")
    if given.data_dir is not None and not given.data_dir.is_dir():
        p.error(f"argument --data-dir: there is no folder {given.data_dir}")
    try:
        check_writable(given.results)
    except WriteError as error:
        p.error(str(error))
    status = 0
    for name in () if given.table else given.only:
        status = max(status, make(name, given.results, given.data_dir, given.rerun))
        if status == INTERRUPTED:
            break
    records = read_all(given.results)
    print(text(records))
    table = given.results / TABLE
    with errors_in_one_line(), whole(table) as temporary:
        temporary.write_text(markdown(records), encoding="utf-8")
    print("written:", table)
    return status


def options() -> Parser:
    """Return the parser of `python -m studies.reproduction`."""
    p = Parser(
        prog="python -m studies.reproduction",
        description="Published numbers beside reproduced ones.",
        allow_abbrev=False,
    )
    # fmt: off
    p.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS), metavar="NAME",
                   help=f"which to run: {', '.join(JOBS)} (default: all)")
    p.add_argument("--rerun", action="store_true",
                   help="also what has a record, which is replaced")
    p.add_argument("--table", action="store_true", help="run nothing, show what is recorded")
    p.add_argument("--data-dir", type=Path, metavar="DIR",
                   help="folder with mnist/, an archive of CIFAR-10 and tinyshakespeare.txt "
                   "(default: download the first two)")
    p.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                   help="folder of the records and the table (default: studies/results)")
    # fmt: on
    return p


def make(name: str, results: Path, folder: Path | None, rerun: bool) -> int:
    """Run an example if its record is missing or resumable, or if `rerun`; return its status."""
    job, path = JOBS[name], results / f"{name}.json"
    if path.exists() and not rerun and not job.resumes:
        return 0
    argv = ["--out", str(path), *job.options, *(["--overwrite"] if rerun else [])]
    if job.data and folder is not None:
        found = [hit for pattern in job.data for hit in sorted(folder.glob(pattern))]
        if not found:
            print(f"{name}: no {job.data[0]} in {folder}; left out", file=sys.stderr)
            return 1
        # The CIFAR-10 loader takes an archive of any name; other loaders take the folder.
        argv += ["--data-dir", str(found[0] if job.data == CIFAR else _folder(found[0]))]
    elif not job.downloads:
        print(f"{name}: needs --data-dir with {job.data[0]}; left out", file=sys.stderr)
        return 1
    module = job.module or name
    module = module if "." in module else f"studies.reproduction.{module}"
    print(f"{name}: python -m {module} {' '.join(argv)}", file=sys.stderr)
    try:
        return importlib.import_module(f"{module}.__main__" if module == GPT else module).main(argv)
    except SystemExit as refused:  # the program has printed the reason
        return int(refused.code or 0)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def read_all(results: Path) -> dict[str, Record | None]:
    """Return the records by name; None if missing."""
    paths = {name: results / f"{name}.json" for name in CHAPTERS}
    return {
        name: json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        for name, path in paths.items()
    }


if __name__ == "__main__":
    sys.exit(main())
