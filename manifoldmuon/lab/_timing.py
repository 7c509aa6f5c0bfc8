"""Timing that survives a noisy machine: several functions in turn, medians, ratios in one run."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    at_least: float = 2e-3,
    middle: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """The median seconds per call of each function, all of them measured in every round.

    A call is repeated until a measurement takes `at_least` seconds. Every function has run once
    before, so that nothing is compiled in a measured round. On a machine that others use, the
    least of the rounds (`middle=min`) says more than their median.
    """
    repeats = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        start = time.perf_counter()
        jax.block_until_ready(function())
        repeats[name] = max(1, round(at_least / max(time.perf_counter() - start, 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                answer = function()
            jax.block_until_ready(answer)
            seconds[name].append((time.perf_counter() - start) / repeats[name])
    return {name: middle(values) for name, values in seconds.items()}
