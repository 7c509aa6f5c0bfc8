"""Timing on a noisy machine, where only ratios can be trusted."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved_seconds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    middle: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the seconds per call of each function, see `interleaved_rounds`.

    Args:
      functions: functions without arguments, by name.
      rounds: the number of measurements per function.
      middle: reduces the rounds to a number. On a shared machine the minimum (`min`) is more
        reliable than the median.
    """
    found = interleaved_rounds(functions, rounds)
    return {name: middle(values) for name, values in found.items()}


def interleaved_rounds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    at_least: float = 2e-3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds per call of each function and round; every round measures all functions.

    Other load on the machine then slows all functions equally. Compilation is not measured.

    Args:
      functions: functions without arguments, by name; their results are waited for.
      rounds: the number of measurements per function.
      at_least: the minimum seconds of a measurement: short calls are repeated.
      clock: returns seconds. `time.process_time` counts the CPU time of all threads of this
        process, which other programs affect less.
    """
    repeats = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        start = clock()
        jax.block_until_ready(function())
        repeats[name] = max(1, round(at_least / max(clock() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = clock()
            for _ in range(repeats[name]):
                answer = function()
            jax.block_until_ready(answer)
            seconds[name].append((clock() - start) / repeats[name])
    return seconds
