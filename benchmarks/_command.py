"""The command line of a benchmark: that of an example, with the record among the results."""

from pathlib import Path

import examples.command
from studies.command import Parser


def command(name: str, description: str) -> Parser:
    """`--out`, `--overwrite`, and room for more; `examples.command.parse` reads them."""
    return examples.command.command(
        name, description, package="benchmarks", folder=Path("docs/benchmarks/results")
    )
