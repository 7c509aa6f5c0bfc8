"""Timing on a noisy machine, where only ratios can be trusted."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved_seconds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    at_least: float = 2e-3,
    middle: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the seconds that a call of each function takes, all measured in every round.

    What else the machine does slows all of them alike. Nothing is compiled in a measured round.

    Args:
      functions: without arguments, by name; what they return is waited for.
      rounds: how often each is measured.
      at_least: seconds that a measurement takes: a short call is repeated.
      middle: of the rounds. On a machine that others use, the least of them (`min`) says more
        than the median.
      clock: in seconds. `time.process_time` counts what all threads of this process take, which
        other programs change less.
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
    return {name: middle(values) for name, values in seconds.items()}
