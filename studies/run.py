"""Running a study: cell by cell, each saved as soon as it is there."""

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
    """Measures what a study asks for, and writes the record.

    Every finished cell is kept in a file beside the record, `NAME.partial`, until the record is
    written. After an interruption the same call resumes with the cells that are missing, and
    makes the record that an uninterrupted run would have made.

    With `jobs` above 1 cells are measured in so many processes, each with one thread. The record
    is that of one process with one thread, to the last bit; with several threads, as is XLA's
    default, sums are rounded in another order. Cells that share their compiled programs stay
    together (`Study.traced`), and cells that measure time (`Study.timed`) are left for the end,
    when nothing else runs.

    A script that asks for this does so under `if __name__ == "__main__":`, because each process
    imports the script again; the study is defined at the top of a module or of a script. Made for
    processors: several processes on one accelerator get in each other's way.

    Args:
      study: with its settings.
      path: of the record; None: it is only returned, and nothing is kept on the way.
      overwrite: whether an existing record may be replaced.
      progress: whether to show a progress bar.
      jobs: the number of processes; any may resume what another number has begun.

    Returns:
      `study`, `settings`, `environment`, `summary` and `rows`, in the types of JSON.

    Raises:
      FileExistsError: if `path` exists and `overwrite` is false; before any work.
      ValueError: if cells are kept beside `path` that belong to other settings or to another
        environment, if a setting is not among its choices, or if `jobs` is less than 1; before
        any work. If the study cannot go to another process.
      ChildProcessError: if a process has died, such as for want of memory.
      WriteError: if the disk is full or read-only: before any work if it is so then; what was
        measured and kept before is unchanged.
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
    """The file that keeps the finished cells of an unfinished record."""
    return Path(path).with_name(Path(path).name + ".partial")


def _key_of(cell: Cell) -> str:
    """The same for equal cells."""
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
    """Cells with their rows, in the order in which they are finished."""
    together = [] if jobs == 1 else [cell for cell in cells if not study.timed(cell)]
    if together:
        yield from in_workers(study, groups_of(study, together), jobs, begin)
    for cell in cells:
        if jobs == 1 or study.timed(cell):
            begin(cell)
            yield cell, measured(study, cell)


def _resume(kept: Path, head: Mapping[str, Any]) -> dict[str, Row]:
    """The rows that are kept for this head, and a file that more can be appended to."""
    lines = kept.read_bytes().splitlines(keepends=True) if kept.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]  # the last may have been cut short
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
    """Differences of two heads of records, as `lower: 0.001 there, 0.01 here`."""
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

    # In a file a bar is one line after another: seldom, there.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        total=total, unit="cell", dynamic_ncols=True, mininterval=pause, disable=not progress
    )
