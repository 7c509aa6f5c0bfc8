"""Workers: processes that measure cells, each with compiled programs of its own.

Each worker is a pool of one process: a larger pool hands a task to any of its processes, and cells
that share their programs are to stay in one. Workers are spawned, because a process that has run
JAX cannot be forked.
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

# N processes with N threads each would be in each other's way.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false"

# What a script may have set after it imported JAX, and what changes results.
_CONFIG = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


# --- The parent --------------------------------------------------------------------------------


def check_jobs(jobs: int) -> None:
    """Refuses a number of processes below 1, and workers that would start workers.

    Raises:
      ValueError: `jobs` is less than 1.
      RuntimeError: this process is a worker, and `jobs` is more than 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    # A worker imports the script of the user before it does anything else.
    if jobs > 1 and multiprocessing.parent_process() is not None:
        raise RuntimeError(f"a worker has started the study again: {_GUARD}")


def in_workers(
    study: Study, groups: Sequence[Sequence[Cell]], jobs: int, begin: Callable[[Cell], None]
) -> Iterator[tuple[Cell, Row]]:
    """Measures groups of cells in processes, and ends these in every case.

    Args:
      study: with its settings.
      groups: of cells; each is measured by one worker, in order.
      jobs: how many workers at most.
      begin: is told of every cell that a worker begins.

    Yields:
      Cells with their rows, as soon as they are there.

    Raises:
      ValueError: the study cannot go to another process.
      ChildProcessError: a worker has died.
      Exception: what a worker has raised.
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
            # Rows before failures: what has been measured is to be saved.
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
    """A worker as the parent sees it: the cell that it measures, and the rest of its group."""

    pool: ProcessPoolExecutor
    process: BaseProcess
    cell: Cell = dataclasses.field(default_factory=dict)
    left: collections.deque[Cell] = dataclasses.field(default_factory=collections.deque)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Says how the process has died, if it has."""
        try:
            yield
        except BrokenProcessPool as error:
            self.process.join(10)
            end = time.monotonic() + 10
            # The pool's own thread may have fetched the code, and not have noted it yet.
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
    except Exception as error:  # of many types, by what the study holds
        raise ValueError(
            f"the study {study.name} cannot go to another process ({error}); define its class at "
            "the top of a module, or leave jobs at 1"
        ) from error


@contextlib.contextmanager
def inherited_by_workers() -> Iterator[None]:
    """Environment of a process started in this block: one thread, and SIGINT ignored.

    The terminal sends Ctrl-C to all processes of a program; the parent alone is to act on it.
    Afterwards the environment and the handler are as before.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    changes = {**_THREADS, "XLA_FLAGS": f"{flags} {_XLA_FLAGS}".strip()}
    before = {name: os.environ.get(name) for name in changes}
    handler = signal.getsignal(signal.SIGINT)
    # Python sets signals in its main thread only, and can put back no handler but its own.
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
    """Prepares a worker; `number` counts workers from 0."""
    _stay_on_one_processor(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)
    for name, value in config.items():
        jax.config.update(name, value)


def _stay_on_one_processor(number: int) -> None:
    """Pins the worker before JAX starts its threads, whose pool of one can deadlock: see "Known
    limits" in the documentation."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def _end_with_parent() -> None:
    """Waits for the parent to end, and ends this process: a killed parent stops no worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def row_of(pickled: bytes, cell: Cell) -> Row:
    """The row of a cell; what is raised survives the way to the parent."""
    try:
        return measured(_study(pickled), cell)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # of many types, by what the exception holds
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


@functools.lru_cache(maxsize=1)
def _study(pickled: bytes) -> Study:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # whatever the import of its module raises
        raise ValueError(
            f"a worker cannot load the study ({type(error).__name__}: {error}); define its class "
            "in a module that can be imported, or leave jobs at 1"
        ) from error
