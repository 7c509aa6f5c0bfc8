"""The command of a study: options from its settings, one-line errors."""

import argparse
import inspect
import itertools
import math
import os
import sys
import types
import typing
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax

from studies.datasets import DatasetError
from studies.program import INTERRUPTED, Parser
from studies.records import WriteError, read_record, whole
from studies.run import partial_path, run_study
from studies.study import Record, Study, fields_of, types_of

FOLDER = Path("runs")


def command(study: type[Study], argv: Sequence[str]) -> int:
    """Run a study from the command line, or redraw the picture of a record.

    Args:
      study: the study's class.
      argv: the options.

    Returns:
      The exit status; 130 after an interruption. Errors exit with status 2.
    """
    p = parser(study)
    given = vars(p.parse_args(argv))
    out, redraw, overwrite = given.pop("out"), given.pop("plot"), given.pop("overwrite")
    jobs = given.pop("jobs")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        if redraw is not None:
            return _redraw(study, redraw, out, overwrite)
        return _measure(study(**settings), out or _free(study.name, overwrite), overwrite, jobs)
    except (ValueError, OSError, DatasetError, BrokenProcessPool) as error:
        p.error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = "flax,studies" if package == "flax" else "studies"
        p.error(f"{study.name} needs {package}: pip install -e '.[{extra}]' from the root")


def _free(name: str, overwrite: bool) -> Path:
    """Return `runs/NAME.json`, or with the next free number."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    paths = (FOLDER / f"{name}.json" for name in names)
    return next(path for path in paths if overwrite or not path.exists())


def _redraw(study: type[Study], source: Path, out: Path | None, overwrite: bool) -> int:
    record = read_record(source, study.name)
    picture = out or source.with_suffix(".png")
    _check_target(picture, ".png", overwrite)
    _show(study.from_settings(record["settings"]), record, picture)
    return 0


def _measure(study: Study, out: Path, overwrite: bool, jobs: int | None) -> int:
    picture = out.with_suffix(".png")
    _check_target(out, ".json", overwrite)
    _check_target(picture, ".png", overwrite)
    kept = (
        f"finished cells are kept in {partial_path(out)}, and the same command resumes from there"
    )
    jobs = default_jobs() if jobs is None else jobs
    try:
        record = run_study(study, out, overwrite, progress=True, jobs=jobs)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    except (BrokenProcessPool, WriteError) as error:
        raise OSError(f"{error}; {kept}" if partial_path(out).exists() else str(error)) from error
    print("written:", out)
    _show(study, record, picture)
    return 0


def _check_target(path: Path, suffix: str, overwrite: bool) -> None:
    if path.suffix != suffix:
        raise ValueError(f"argument --out must end in {suffix}; got {path}")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; pass --overwrite, or choose another name with --out")


def _show(study: Study, record: Record, picture: Path) -> None:
    print(study.table(record))
    if (figure := study.plot(record)) is not None:
        with whole(picture) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
        print("written:", picture)


def default_jobs() -> int:
    """Return 1 on an accelerator, else the number of processors, at most four: each process holds
    its own data and compiled programs."""
    return 1 if jax.default_backend() != "cpu" else min(os.cpu_count() or 1, 4)


def parser(study: type[Study]) -> Parser:
    """Create the parser of a study: its settings and the output options."""
    p = Parser(
        prog=f"python -m studies {study.name}",
        description=inspect.cleandoc(study.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = types_of(study)
    for field in fields_of(study):
        _add(p, field.name, hints[field.name], field.default, field.metadata)
    # fmt: off
    p.add_argument("--out", type=Path, metavar="FILE",
                   help=f"record to write, and picture of the same name (default: {FOLDER}/"
                   f"{study.name}.json, or the next free number)")
    p.add_argument("--jobs", type=int, metavar="N",
                   help="number of processes; with several, each has a single thread "
                   "(default: number of processors, at most 4; 1 on an accelerator)")
    p.add_argument("--overwrite", action="store_true", help="replace an existing record or picture")
    p.add_argument("--plot", type=Path, metavar="RECORD",
                   help="print the table of a record and draw its picture again, without running")
    # fmt: on
    return p


def _add(p: Parser, name: str, hint: Any, default: Any, metadata: Any) -> None:
    flag, shown = "--" + name.replace("_", "-"), _shown(default)
    text = metadata["help"].replace("%", "%%") + (f" (default: {shown})" if shown else "")
    if hint is bool:
        p.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    several = typing.get_origin(hint) is tuple
    item = typing.get_args(hint)[0] if several or isinstance(hint, types.UnionType) else hint
    p.add_argument(
        flag,
        type=_finite if item is float else item,
        nargs="*" if several else None,
        default=default,
        choices=metadata["choices"] or None,
        metavar=None if metadata["choices"] and not several else _METAVAR[item],
        help=text,
    )


def _shown(default: Any) -> str:
    """Format a default as typed on the command line; empty for None."""
    if default is None:
        return ""
    items = default if isinstance(default, tuple) else (default,)
    return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


_METAVAR = {int: "N", float: "X", str: "NAME", Path: "DIR"}
