"""The command line of a benchmark: that of an example, with the record among the results."""

from pathlib import Path

from examples import _command
from studies.command import Parser


def command(name: str, description: str) -> Parser:
    """`--out`, `--overwrite`, and room for more; `examples._command.parse` reads them."""
    return _command.command(
        name, description, package="benchmarks", folder=Path("benchmarks/results")
    )
