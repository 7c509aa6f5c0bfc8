"""The command line of a benchmark: that of an example, with the record among the results."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import examples.command
from studies.command import Parser
from studies.records import whole


def command(name: str, description: str) -> Parser:
    """`--out`, `--overwrite`, and room for more; `examples.command.parse` reads them."""
    return examples.command.command(
        name, description, package="benchmarks", folder=Path("docs/benchmarks/results")
    )


def save_with_table(given: argparse.Namespace, record: Mapping[str, Any], text: str) -> None:
    """Prints the table, and writes the record and, beside it, the table as `.md`."""
    print(text)
    examples.command.save(given, record)
    with examples.command.told(), whole(given.out.with_suffix(".md")) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
