"""Run a study: cell by cell, each saved as soon as it is measured."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.records import environment, not_written, plain, whole, write_record
from studies.study import Cell, Record, Row, Study, check_choices, groups_of, measured
from studies.workers import check_jobs, in_workers


def run_study(
    study: Study,
    path: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    jobs: int = 1,
) -> Record:
    """Measure all cells of a study and write the record.

    Finished cells are saved next to the record, in `NAME.partial`, until the record is written.
    After an interruption the same call resumes with the missing cells and makes the record that an
    uninterrupted run would have made.

    With `jobs` above 1, cells are measured in that many single-threaded processes. The record
    equals the record of a single-threaded process, bit for bit; with several threads, XLA's
    default, sums are rounded in a different order. Cells that share compiled programs stay
    together (`Study.traced`); cells that measure time (`Study.timed`) run last and alone.

    A script must call this under `if __name__ == "__main__":`, because each process imports the
    script again, and must define the study at the top of a module or script. `jobs` is meant for
    CPUs: several processes compete for an accelerator.

    Args:
      study: the study with its settings.
      path: the file of the record; None saves nothing and only returns the record.
      overwrite: whether to replace an existing record.
      progress: whether to show a progress bar.
      jobs: the number of processes; a run may resume with a different number.

    Returns:
      `study`, `settings`, `environment`, `summary` and `rows`, in JSON types.

    Raises:
      FileExistsError: `path` exists and `overwrite` is false; before any work.
      ValueError: saved cells next to `path` belong to different settings or a different
        environment, a setting is not among its choices, or `jobs` is less than 1; before any
        work. Also if the study cannot be pickled for another process.
      ChildProcessError: a process has died, for example of memory exhaustion.
      WriteError: the disk is full or read-only; before any work if already so at the start. Saved
        cells are unchanged.
    """
    check_choices(study)
    check_jobs(jobs)
    head = {"study": study.name, "settings": study.settings(), "environment": environment()}
    if path is not None and Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or pass overwrite=True")
    kept = None if path is None else partial_path(path)
    done = {} if kept is None else _resume(kept, head)
    rows = _rows(study, kept, done, progress, jobs)
    record = plain({**head, "summary": study.summarise(rows), "rows": rows})
    if path is not None and kept is not None:
        write_record(path, record, overwrite=overwrite)
        kept.unlink()
    return record


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Return the file for the finished cells of an unfinished record."""
    return Path(path).with_name(Path(path).name + ".partial")


def _key_of(cell: Cell) -> str:
    """Return a string key that identifies a cell."""
    return json.dumps(cell, sort_keys=True)


def _rows(
    study: Study, kept: Path | None, done: dict[str, Row], progress: bool, jobs: int
) -> list[Row]:
    cells = {_key_of(cell): cell for cell in map(plain, study.cells())}
    left = [cell for key, cell in cells.items() if key not in done]
    with _bar(len(cells), progress) as bar:
        bar.update(len(cells) - len(left))

        def begin(cell: Cell) -> None:
            bar.set_postfix_str(", ".join(str(value) for value in cell.values()))

        with contextlib.closing(_measured(study, left, jobs, begin)) as found:
            for cell, row in found:
                done[_key_of(cell)] = row
                if kept is not None:
                    _append(kept, row, _key_of(cell))
                bar.update()
    return [done[key] for key in cells]


def _measured(
    study: Study, cells: Sequence[Cell], jobs: int, begin: Callable[[Cell], None]
) -> Generator[tuple[Cell, Row], None, None]:
    """Yield cells with their rows, in order of completion."""
    together = [] if jobs == 1 else [cell for cell in cells if not study.timed(cell)]
    if together:
        yield from in_workers(study, groups_of(study, together), jobs, begin)
    for cell in cells:
        if jobs == 1 or study.timed(cell):
            begin(cell)
            yield cell, measured(study, cell)


def _resume(kept: Path, head: Mapping[str, Any]) -> dict[str, Row]:
    """Load the saved rows of this head, and leave a file to which rows can be appended."""
    lines = kept.read_bytes().splitlines(keepends=True) if kept.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]  # the last may be incomplete
    if lines and (found := differences(json.loads(lines[0]), head)):
        raise ValueError(
            f"{kept} holds cells of another run ({'; '.join(found)}); delete it or choose "
            "another name"
        )
    lines = lines or [(json.dumps(head) + "\n").encode()]
    with whole(kept) as temporary:
        temporary.write_bytes(b"".join(lines))
    return {entry["cell"]: entry["row"] for entry in map(json.loads, lines[1:])}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences of two record heads, as `lower: 0.001 there, 0.01 here`."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        there, here = old.get(key), new.get(key)
        if isinstance(there, dict) and isinstance(here, dict):
            found += differences(there, here)
        elif there != here:
            found.append(f"{key}: {there} there, {here} here")
    return found


def _append(kept: Path, row: Row, key: str) -> None:
    try:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": key, "row": row}) + "\n")
    except OSError as error:
        raise not_written(kept, error) from error


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    # In a log file every refresh is a line, so refresh rarely there.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total, unit="cell", dynamic_ncols=True, mininterval=pause, disable=not progress
    )
