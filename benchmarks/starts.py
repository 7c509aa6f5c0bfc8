"""Many starts of `minimize`: `jax.vmap` against `jax.lax.map`.

    python -m benchmarks starts    # two minutes; docs/benchmarks/results/starts.*

Uses the problems, tolerance and dtype of `benchmarks.minimize`. Times are CPU seconds without
compilation: the minimum of several interleaved calls.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._command import command, save_with_table
from benchmarks.minimize import METHODS, PROBLEMS, TOLERANCE, Problem, cost_of
from manifoldmuon.minimize import minimize
from manifoldmuon.optim import init_tree
from studies.display import markdown_table
from studies.program import parse


def measure(problem: Problem, method: str, size: int, starts: int, rounds: int) -> dict[str, Any]:
    """Measure all starts of a problem with a method, batched and sequentially."""
    data = problem.data(np.random.default_rng(size), size) * 1.0
    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float64) for shape in problem.shapes(size))
    keys = jax.random.split(jax.random.key(1), starts)
    many = jax.vmap(lambda key: init_tree(problem.manifolds, key, shapes))(keys)
    cost = cost_of(problem)

    def solve(x):
        return minimize(
            cost, problem.manifolds, x, (data,),
            method=METHODS[method], tolerance=TOLERANCE, max_steps=2000,
        )  # fmt: skip

    calls = {"vmap": jax.jit(jax.vmap(solve)), "map": jax.jit(lambda x: jax.lax.map(solve, x))}
    found = {name: jax.block_until_ready(call(many)) for name, call in calls.items()}
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before = time.process_time()
            jax.block_until_ready(call(many))
            spent[name].append(time.process_time() - before)
    steps = found["map"].steps
    return {
        "problem": problem.name, "method": method, "size": size,
        **{name: min(values) for name, values in spent.items()},
        "median_steps": float(jnp.median(steps)), "most_steps": int(steps.max()),
        "failed": {name: int((result.reason != 0).sum()) for name, result in found.items()},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of CPU seconds and their ratio."""
    header = ["problem", "method", "size", "vmap", "lax.map", "lax.map ÷ vmap",
              "steps: median, most"]  # fmt: skip
    lines = [
        [
            row["problem"], row["method"], row["size"], f"{row['vmap']:.2f}", f"{row['map']:.2f}",
            f"{row['map'] / row['vmap']:.2f}", f"{row['median_steps']:.0f}, {row['most_steps']}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("starts", "Many starts of minimize: jax.vmap beside jax.lax.map.")
    parser.add_argument("--problems", nargs="+", default=["PCA, ordered", "ICA"], help="names")
    parser.add_argument("--size", type=int, default=10, help="of the problems")
    parser.add_argument("--starts", type=int, default=100, help="of each problem")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    options = parse(parser, argv, beside=(".md",))
    rows = []
    with jax.enable_x64(True):
        for problem in PROBLEMS:
            if problem.name in options.problems:
                for method in METHODS:
                    found = measure(problem, method, options.size, options.starts, options.rounds)
                    rows.append(found)
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
    settings = {"tolerance": TOLERANCE, "starts": options.starts, "rounds": options.rounds}
    save_with_table(options, settings | {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
