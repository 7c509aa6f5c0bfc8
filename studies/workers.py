"""Workers: processes that measure cells, each with its own compiled programs.

Each worker is a pool of a single process: a larger pool would hand a task to any process, but
cells that share programs must stay in the same process. Workers are spawned, because a process
that has run JAX cannot be forked.
"""

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any

import jax

from studies.study import Cell, Row, Study, measured

_GUARD = "a script that uses several processes is a file, its work under if __name__ == '__main__'"

# N processes with N threads each would compete for the processors.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"

# Settings that change results and that a script may have set after importing JAX.
_CONFIG = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


# --- The parent --------------------------------------------------------------------------------


def check_jobs(jobs: int) -> None:
    """Check the number of processes, and that no worker starts workers.

    Raises:
      ValueError: `jobs` is less than 1.
      RuntimeError: this process is a worker, and `jobs` is more than 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    # A spawned worker first imports the user's script; without a guard it gets here.
    if jobs > 1 and multiprocessing.parent_process() is not None:
        raise RuntimeError(f"a worker has started the study again: {_GUARD}")


def in_workers(
    study: Study, groups: Sequence[Sequence[Cell]], jobs: int, begin: Callable[[Cell], None]
) -> Iterator[tuple[Cell, Row]]:
    """Measure groups of cells in worker processes, which always end with this iterator.

    Args:
      study: the study with its settings.
      groups: groups of cells; the cells of a group run in the same worker, in order.
      jobs: the maximum number of workers.
      begin: called with every cell that a worker begins.

    Yields:
      Cells with their rows, as soon as they are measured.

    Raises:
      ValueError: the study cannot be pickled.
      ChildProcessError: a worker has died.
      Exception: any exception raised in a worker.
    """
    pickled, waiting = _pickled(study), collections.deque(groups)
    workers: list[_Worker] = []
    busy: dict[Future[Row], _Worker] = {}

    def proceed(worker: _Worker) -> None:
        if not worker.left and waiting:
            worker.left.extend(waiting.popleft())
        if worker.left:
            worker.cell = worker.left.popleft()
            begin(worker.cell)
            with worker.watched():
                busy[worker.pool.submit(row_of, pickled, worker.cell)] = worker

    try:
        with inherited_by_workers():
            workers += [_started(number) for number in range(min(jobs, len(groups)))]
        for worker in workers:
            proceed(worker)
        while busy:
            done = [(future, busy.pop(future)) for future in wait(busy, None, FIRST_COMPLETED)[0]]
            # Rows before failures, so that finished measurements are saved.
            for future, worker in sorted(done, key=lambda one: one[0].exception() is not None):
                with worker.watched():
                    cell, row = worker.cell, future.result()
                proceed(worker)
                yield cell, row
    finally:
        for worker in busy.values():
            worker.process.kill()
        for worker in workers:
            worker.pool.shutdown()


@dataclasses.dataclass
class _Worker:
    """The parent's view of a worker: its current cell and the rest of its group."""

    pool: ProcessPoolExecutor
    process: BaseProcess
    cell: Cell = dataclasses.field(default_factory=dict)
    left: collections.deque[Cell] = dataclasses.field(default_factory=collections.deque)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raise `ChildProcessError` with the cause if the process has died."""
        try:
            yield
        except BrokenProcessPool as error:
            self.process.join(10)
            end = time.monotonic() + 10
            # The pool's thread may have fetched the exit code without having stored it yet.
            while (code := self.process.exitcode) is None and time.monotonic() < end:
                time.sleep(0.01)
            if code is not None and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
                how += " (out of memory?)" if code == -signal.SIGKILL else ""
            else:
                how = f"ended with exit code {code}"
            where = ", ".join(f"{name} {value}" for name, value in self.cell.items())
            hint = f"; {_GUARD}" if code == 1 else ""
            raise ChildProcessError(f"a worker {how} in the cell {where}{hint}") from error


def _started(number: int) -> _Worker:
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn, _begin, (number, config, os.getcwd()))
    before = set(multiprocessing.active_children())
    pool.submit(os.getpid)  # starts the process
    (process,) = set(multiprocessing.active_children()) - before
    return _Worker(pool, process)


def _pickled(study: Study) -> bytes:
    try:
        return pickle.dumps(study)
    except Exception as error:  # the type depends on the fields of the study
        raise ValueError(
            f"the study {study.name} cannot go to another process ({error}); define its class at "
            "the top of a module, or leave jobs at 1"
        ) from error


@contextlib.contextmanager
def inherited_by_workers() -> Iterator[None]:
    """Make processes started in this block use one thread and ignore SIGINT.

    The terminal sends Ctrl-C to all processes of a program; only the parent must handle it. The
    environment and the handler are restored afterwards.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    changes = {**_THREADS, "XLA_FLAGS": f"{flags} {_XLA_FLAGS}".strip()}
    before = {name: os.environ.get(name) for name in changes}
    handler = signal.getsignal(signal.SIGINT)
    # Python sets signals only in its main thread, and cannot restore a handler set outside Python.
    ignored = threading.current_thread() is threading.main_thread() and handler is not None
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if ignored:
            signal.signal(signal.SIGINT, handler)


# --- The worker --------------------------------------------------------------------------------


def _begin(number: int, config: dict[str, Any], folder: str) -> None:
    """Prepare a worker; `number` counts workers from 0."""
    _stay_on_one_processor(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)
    for name, value in config.items():
        jax.config.update(name, value)


def _stay_on_one_processor(number: int) -> None:
    """Pin the worker to a processor before JAX starts its threads: XLA's pool then has a single
    thread, while larger pools can deadlock (see "Known limits" in the documentation)."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def _end_with_parent() -> None:
    """Wait for the parent to end, then exit: a killed parent cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def row_of(pickled: bytes, cell: Cell) -> Row:
    """Return the row of a cell; raise only exceptions that can be pickled."""
    try:
        return measured(_study(pickled), cell)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the type depends on the contents of the exception
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


@functools.lru_cache(maxsize=1)
def _study(pickled: bytes) -> Study:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # the import of its module can raise anything
        raise ValueError(
            f"a worker cannot load the study ({type(error).__name__}: {error}); define its class "
            "in a module that can be imported, or leave jobs at 1"
        ) from error
