"""Run a study: cell by cell, each saved as soon as it is measured."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from studies.records import WriteError, environment, plain, whole, write_record
from studies.study import Cell, Record, Row, Study, check_choices, groups_of, measured


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

    With `jobs` above 1, cells are measured in that many single-threaded processes, which read JAX's
    configuration from the environment. Cells that share compiled programs stay together
    (`Study.traced`) and are saved together; cells that measure time (`Study.timed`) run last and
    alone. `jobs` is meant for CPUs: several processes compete for an accelerator.

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
        work.
      BrokenProcessPool: a process has died, for example of memory exhaustion.
      WriteError: the disk is full or read-only; before any work if already so at the start. Saved
        cells are unchanged.
    """
    check_choices(study)
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    head = {"study": study.name, "settings": study.settings(), "environment": environment()}
    if path is not None and Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; choose another name or pass overwrite=True")
    kept = None if path is None else partial_path(path)
    done = {} if kept is None else _resume(kept, head)
    cells = {_key_of(cell): cell for cell in map(plain, study.cells())}
    left = [cell for key, cell in cells.items() if key not in done]
    with (
        _bar(len(cells), len(done), progress) as bar,
        contextlib.closing(_measured(study, left, jobs)) as found,
    ):
        for cell, row in found:
            done[_key_of(cell)] = row
            if kept is not None:
                _append(kept, {"cell": _key_of(cell), "row": row})
            bar.set_postfix_str(", ".join(map(str, cell.values())), refresh=False)
            bar.update()
    rows = [done[key] for key in cells]
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


Found = Generator[tuple[Cell, Row], None, None]


def _measured(study: Study, cells: Sequence[Cell], jobs: int) -> Found:
    """Yield cells with their rows, in order of completion."""
    together = [] if jobs == 1 else [cell for cell in cells if not study.timed(cell)]
    if together:
        yield from _in_processes(study, groups_of(study, together), jobs)
    for cell in cells:
        if jobs == 1 or study.timed(cell):
            yield cell, measured(study, cell)


def _in_processes(study: Study, groups: Sequence[Sequence[Cell]], jobs: int) -> Found:
    import joblib
    from joblib.externals.loky import get_reusable_executor

    # N processes with N threads each would compete for the processors; XLA's pools of several
    # threads can deadlock (see "Known limits" in the documentation), and NPROC is their size.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    single = {"XLA_FLAGS": flags, "NPROC": "1", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}
    with (
        mock.patch.dict(os.environ, single),
        joblib.parallel_config("loky", inner_max_num_threads=1),
    ):
        pool: Any = joblib.Parallel(jobs, return_as="generator_unordered")
        # Ctrl-C is this process's to handle: workers inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            found = pool(joblib.delayed(_measure_group)(study, group) for group in groups)
        finally:
            signal.signal(signal.SIGINT, handler)
        try:
            for pairs in found:
                yield from pairs
        except BaseException:  # after Ctrl-C a worker would finish its cell first
            get_reusable_executor().shutdown(wait=False, kill_workers=True)
            raise


def _measure_group(study: Study, group: Sequence[Cell]) -> list[tuple[Cell, Row]]:
    return [(cell, measured(study, cell)) for cell in group]


def _resume(kept: Path, head: Mapping[str, Any]) -> dict[str, Row]:
    """Load the saved rows of this head, and leave a file to which rows can be appended."""
    try:
        lines = kept.read_text(encoding="utf-8").splitlines(keepends=True) if kept.exists() else []
        lines = [line for line in lines if line.endswith("\n")]  # the last may be incomplete
        saved = [json.loads(line) for line in lines] or [head]
        old, new = ({**h, **h["settings"], **h["environment"]} for h in (saved[0], head))
        done = {entry["cell"]: entry["row"] for entry in saved[1:]}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{kept} is damaged ({error}); delete it or choose another name"
        ) from error
    if found := [
        f"{key}: {old.get(key)} there, {new.get(key)} here"
        for key in sorted({*old, *new} - {"settings", "environment"})
        if old.get(key) != new.get(key)
    ]:
        raise ValueError(
            f"{kept} holds cells of another run ({'; '.join(found)}); delete it or choose another "
            "name"
        )
    lines = lines or [json.dumps(head) + "\n"]
    with whole(kept) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")
    return done


def _append(kept: Path, entry: Mapping[str, Any]) -> None:
    try:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise WriteError(kept, error) from error


def _bar(total: int, done: int, progress: bool) -> Any:
    from tqdm import tqdm

    # In a log file every refresh is a line, so refresh rarely there.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, initial=done, unit="cell", dynamic_ncols=True, mininterval=pause,
                disable=not progress)  # fmt: skip
