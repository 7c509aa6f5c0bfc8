"""A worker from inside: a process that answers cells with rows until nobody asks any more."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from manifoldmuon.lab._cells import measured
from manifoldmuon.lab._study import Cell, Row, Study


class Failure(NamedTuple):
    """What was raised where a row was asked for."""

    error: BaseException


def work(
    connection: Connection, pickled: bytes, config: dict[str, Any], folder: str, number: int
) -> None:
    """The life of a worker; `number` counts workers from 0."""
    _stay_on_one_processor(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(folder)
    for name, value in config.items():
        jax.config.update(name, value)
    serve(connection, pickled)


def _stay_on_one_processor(number: int) -> None:
    """Before JAX starts its threads: with pools of two threads XLA has been seen to wait for
    itself forever in a training loop of many small operations, with one it has not."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def _end_with_parent() -> None:
    """Even if it was killed and could dismiss nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def serve(connection: Connection, pickled: bytes) -> None:
    """Answers every cell that arrives with its row, until nobody asks any more."""
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
