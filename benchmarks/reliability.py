"""Worst errors of manifolds, solvers and transformations over random cases.

    python -m benchmarks reliability    # some minutes; docs/benchmarks/results/reliability.json

Hypothesis draws the cases of `tests.oracles`. A case that breaks a bound of `LIMITS` is shrunk and
printed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tqdm import tqdm

from benchmarks._harness import command
from studies.program import parse, save
from tests.oracles import cases, minima, runs


def main(argv: list[str] | None = None) -> None:
    """Draw the cases and write the worst figures; stop with the case that breaks a bound."""
    parser = command("reliability", __doc__)
    parser.add_argument("--examples", type=int, default=50, metavar="N",
                        help="cases of each manifold and dtype, and of each optimizer")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, argv)
    worst: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    profile = settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )

    def draw_all(kind: str, table: str, check: Callable, *strategies: st.SearchStrategy) -> None:
        def enter(drawn: tuple[Any, ...]) -> None:
            counts[kind] = counts.get(kind, 0) + 1
            row = worst.setdefault(table, {})
            for name, figure in check(*drawn).items():
                row[name] = max(row.get(name, 0.0), figure)

        seed(options.seed)(profile(given(st.tuples(*strategies))(enter)))()
        # Compiled programs use many memory mappings, and Linux allows 65530.
        jax.clear_caches()

    for name in tqdm((*cases.MATRICES, *cases.ROWS), unit="manifold"):
        for dtype in cases.DTYPES:
            drawn = cases.cases((name,), dtypes=(dtype,))
            draw_all("directions", f"{name}, {dtype}", cases.check_case, drawn)
    for name in runs.LINKS:
        train = functools.partial(runs.check_training, name)
        draw_all("runs", name, train, runs.SCALES, cases.SEEDS)
    for name in runs.WARM:
        switch = functools.partial(runs.check_switching, name)
        draw_all("sequences", f"{name}, switching", switch, runs.SEQUENCES)
    worst |= runs.check_bounds(range(options.seed, options.seed + options.examples))
    for name in tqdm(minima.REACH, unit="descent"):
        worst[f"minima, {name}"] = minima.check_minimum(name, seed=options.seed)
        jax.clear_caches()
    counts |= {"networks": options.examples, "descents": len(minima.REACH)}
    missed = {
        name: minima.excesses(descent, seed=options.seed) for name, descent in minima.MISS.items()
    }
    for name, table in sorted(worst.items()):
        print(f"{name:45}", *(f"{figure:9.1e}" for figure in table.values()))
    record = {
        "what": "the worst figures of random cases, measured in float64",
        "limits": cases.LIMITS,
        "limits_of_residuals": cases.RESIDUALS,
        "limit_of_normalized_updates": 1 + runs.EXCESS,
        "float64": cases.OF_FLOAT64,
        "short_dtypes": "their eps, where that is larger",
        "seed": options.seed,
        "cases": counts,
        "worst": dict(sorted(worst.items())),
        "stop_above_the_minimum": missed,
    }
    save(options, record)
    print("written:", options.out)


if __name__ == "__main__":
    main()
