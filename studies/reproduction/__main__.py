"""Table of published and reproduced numbers.

    python -m studies.reproduction --data-dir DIR                # runs what has no record yet
    python -m studies.reproduction --table                       # of the records that are there

Records are kept in `studies/results`; an interrupted run keeps its finished parts. The table is
also written there, as Markdown, for the documentation.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from studies import STUDIES
from studies.command import command
from studies.program import INTERRUPTED, Parser
from studies.records import whole
from studies.reproduction.rows import CHAPTERS, RESULTS, TABLE, markdown, read_all

DATA = {
    "hello_mnist": "mnist",
    **dict.fromkeys(("hello_gpt", "hello_gpt-constrained", "hello_gpt-bounded"), "."),
    **dict.fromkeys(
        ("manifold_cifar", "agd_cifar10", "weight_erasure", "weight_erasure_256"), "cifar-10-*"
    ),
}
"""The data of each record, below the data folder; left out: none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing studies and print the table; return the exit status."""
    p = Parser(
        prog="python -m studies.reproduction",
        description="Published numbers beside reproduced ones.",
        allow_abbrev=False,
    )
    # fmt: off
    p.add_argument("--only", nargs="+", choices=list(CHAPTERS), default=list(CHAPTERS),
                   metavar="NAME", help=f"chapters to run: {', '.join(CHAPTERS)} (default: all)")
    p.add_argument("--table", action="store_true", help="print the saved table, without running")
    p.add_argument("--data-dir", type=Path, metavar="DIR",
                   help="folder with mnist/, an archive of CIFAR-10 and tinyshakespeare.txt "
                   "(default: download)")
    p.add_argument("--results", type=Path, default=RESULTS, metavar="DIR",
                   help="folder of the records and the table (default: studies/results)")
    # fmt: on
    given = p.parse_args(argv)
    status = 0
    for name in () if given.table else given.only:
        if status != INTERRUPTED:
            status = max(status, make(name, given.results, given.data_dir))
    table = markdown(read_all(given.results))
    print(table)
    with whole(given.results / TABLE) as temporary:
        temporary.write_text(table, encoding="utf-8")
    return status


def make(name: str, results: Path, folder: Path | None) -> int:
    """Run a study if its record is missing; return its status."""
    path = results / f"{name}.json"
    if path.exists():
        return 0
    study, *argv = [*shlex.split(CHAPTERS[name].command), "--out", str(path)]
    if folder is not None and name in DATA:
        found = sorted(folder.glob(DATA[name])) if DATA[name] != "." else [folder]
        argv += ["--data-dir", str(found[0] if found else folder)]
    print(f"{name}: python -m studies {study} {shlex.join(argv)}", file=sys.stderr)
    try:
        return command(STUDIES[study], argv)
    except SystemExit as refused:  # the study has printed the reason
        return int(refused.code or 0)


if __name__ == "__main__":
    sys.exit(main())
