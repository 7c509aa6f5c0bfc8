"""Shared by the benchmarks: command line, timing, and the record with its table."""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from studies import program
from studies.records import whole
from studies.timing import interleaved_rounds

RESULTS = Path("docs/benchmarks/results")


def command(name: str, doc: str | None, rounds: int = 0) -> program.Parser:
    """Return a parser with `--out` and `--overwrite`; read it with `studies.program.parse`.

    Args:
      name: name of the benchmark.
      doc: the benchmark's docstring; its first line describes the command.
      rounds: default of `--rounds`; 0 omits the option.
    """
    first = (doc or "").partition("\n")[0]
    p = program.command(f"benchmarks {name}", first, folder=RESULTS, record=name)
    if rounds:
        p.add_argument("--rounds", type=int, default=rounds,
                       help="timed rounds (default: %(default)s)")  # fmt: skip
    return p


def compile_without_tpus() -> None:
    """Let libtpu compile on a host without TPUs; it must not query a cloud for them."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # silences a warning
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # allow concurrent compilations


def timed(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Time functions in interleaved rounds; compare ratios within one call.

    Args:
      functions: compiled functions without arguments, by name.
      rounds: number of measurements of each function.
      clock: returns seconds; `time.process_time` counts CPU time.

    Returns:
      `seconds`: median by name. `spread`: half the interquartile range over the median, by name.
    """
    found = interleaved_rounds(functions, rounds, clock=clock)
    quartiles = {name: np.percentile(values, (25, 50, 75)) for name, values in found.items()}
    return {
        "seconds": {name: float(q[1]) for name, q in quartiles.items()},
        "spread": {name: float((q[2] - q[0]) / (2 * q[1])) for name, q in quartiles.items()},
    }


def save_with_table(given: argparse.Namespace, record: Mapping[str, Any], text: str) -> None:
    """Print the table; write the record, and next to it the table as `.md`."""
    print(text)
    program.save(given, record)
    with program.errors_in_one_line(), whole(given.out.with_suffix(".md")) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
