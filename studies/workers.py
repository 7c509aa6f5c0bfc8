"""Workers: processes that measure cells, each with compiled programs of its own.

A worker is asked for one cell after the other and answers each with its row, so that the parent
can save it at once. Groups are never split, since cells of a group share their programs. Workers
are started afresh (spawned), because a process that has run JAX cannot be forked.
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
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import jax

from studies.study import Cell, Row, Study, measured

_NAME = "manifoldmuon-study"
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


class Failure(NamedTuple):
    """What was raised where a row was asked for."""

    error: BaseException


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
    if jobs > 1 and multiprocessing.current_process().name.startswith(_NAME):
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
    try:
        with inherited_by_workers():
            for number in range(min(jobs, len(groups))):
                workers.append(_start(pickled, number))
        for worker in workers:
            worker.proceed(waiting, begin)
        while busy := {worker.connection: worker for worker in workers if worker.cell is not None}:
            answers = []
            for connection in wait(list(busy)):
                worker = busy[connection]  # pyright: ignore[reportArgumentType]
                answers.append((worker.cell, worker.answer()))
                worker.proceed(waiting, begin)
            # Rows before failures: what has been measured is to be saved.
            yield from ((cell, row) for cell, row in answers if not isinstance(row, Failure))
            for _, answer in answers:
                if isinstance(answer, Failure):
                    raise answer.error
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.process.join()


@dataclasses.dataclass
class _Worker:
    """A worker as the parent sees it: the cell that it measures, and the rest of its group."""

    process: BaseProcess
    connection: Connection
    cell: Cell | None = None
    left: collections.deque[Cell] = dataclasses.field(default_factory=collections.deque)
    answered: bool = False

    def proceed(
        self, waiting: collections.deque[Sequence[Cell]], begin: Callable[[Cell], None]
    ) -> None:
        """Asks for the next cell, if there is one."""
        if not self.left and waiting:
            self.left.extend(waiting.popleft())
        self.cell = self.left.popleft() if self.left else None
        if self.cell is not None:
            begin(self.cell)
            with contextlib.suppress(OSError):  # if it has died, `answer` finds out
                self.connection.send(self.cell)

    def answer(self) -> Row | Failure:
        """What it has sent, or how it ended."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            return Failure(ChildProcessError(self._how_it_ended()))
        self.answered = True
        return answer

    def _how_it_ended(self) -> str:
        self.process.join(10)
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        where = ", ".join(f"{name} {value}" for name, value in (self.cell or {}).items())
        hint = "" if self.answered or code != 1 else f"; {_GUARD}"
        return f"a worker {how} in the cell {where}{hint}"

    def stop(self) -> None:
        """Ends it: at once where it measures something."""
        self.connection.close()  # whereupon an idle worker ends
        if self.cell is not None:
            self.process.kill()


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
    """What a process that is started in this block inherits: one thread, and SIGINT ignored.

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


def _start(pickled: bytes, number: int) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    arguments = theirs, pickled, config, os.getcwd(), number
    process = spawn.Process(target=_work, args=arguments, name=f"{_NAME}-{number + 1}", daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed
    return _Worker(process, ours)


# --- The worker --------------------------------------------------------------------------------


def _work(
    connection: Connection, pickled: bytes, config: dict[str, Any], folder: str, number: int
) -> None:
    """All that a worker does; `number` counts workers from 0."""
    _stay_on_one_processor(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)
    for name, value in config.items():
        jax.config.update(name, value)
    serve(connection, pickled)


def _stay_on_one_processor(number: int) -> None:
    """Before JAX starts its threads: a pool of one thread cannot wait for itself, see "Known
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


def serve(connection: Connection, pickled: bytes) -> None:
    """Answers every cell that arrives with its row, until the parent closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(_answer(pickled, connection.recv()))


def _answer(pickled: bytes, cell: Cell) -> Row | Failure:
    try:
        return measured(_study(pickled), cell)
    except BaseException as error:  # interruptions too: the parent raises whatever it is
        portable = _portable(error)
        portable.add_note(f"raised in a worker:\n\n{traceback.format_exc()}")
        return Failure(portable)


@functools.lru_cache(maxsize=1)
def _study(pickled: bytes) -> Study:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # whatever the import of its module raises
        raise ValueError(
            f"a worker cannot load the study ({type(error).__name__}: {error}); define its class "
            "in a module that can be imported, or leave jobs at 1"
        ) from error


def _portable(error: BaseException) -> BaseException:
    """The exception, or its message where it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of many types, by what the exception holds
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
