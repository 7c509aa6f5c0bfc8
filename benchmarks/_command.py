"""Command line of a benchmark: a study's command line that saves to the benchmark results."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies import program
from studies.records import whole


def command(name: str, description: str) -> program.Parser:
    """Return a parser with `--out` and `--overwrite`; read it with `studies.program.parse`."""
    folder = Path("docs/benchmarks/results")
    return program.command(f"benchmarks.{name}", description, folder=folder)


def save_with_table(given: argparse.Namespace, record: Mapping[str, Any], text: str) -> None:
    """Print the table; write the record, and next to it the table as `.md`."""
    print(text)
    program.save(given, record)
    with program.errors_in_one_line(), whole(given.out.with_suffix(".md")) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
