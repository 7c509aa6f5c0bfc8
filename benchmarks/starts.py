"""CPU time of a hundred starts of `minimize` by `jax.vmap` and `jax.lax.map`, and of one start.

    python -m benchmarks starts    # two minutes; docs/benchmarks/results/starts.*

Uses the problems, tolerance and dtype of `benchmarks.minimize`. Times exclude compilation.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._harness import command, save_with_table, timed
from benchmarks.minimize import METHODS, PROBLEMS, TOLERANCE, Problem, solver
from studies.display import markdown_table
from studies.program import parse


def measure(problem: Problem, method: str, size: int, starts: int, rounds: int) -> dict[str, Any]:
    """Measure all starts of a problem with a method, batched and sequentially."""
    data, run = (problem.draw(size),), solver(problem, method)
    many = jax.vmap(lambda key: problem.start(size, key))(
        jax.random.split(jax.random.key(1), starts)
    )
    programs = {
        "one": (jax.jit(lambda x: run(x, data)), jax.tree.map(lambda x: x[0], many)),
        "vmap": (jax.jit(jax.vmap(lambda x: run(x, data))), many),
        "map": (jax.jit(lambda x: jax.lax.map(lambda y: run(y, data), x)), many),
    }
    calls = {name: functools.partial(*program) for name, program in programs.items()}
    found = {name: call() for name, call in calls.items()}
    steps = found["map"].steps
    return {
        "problem": problem.name, "method": method, "size": size,
        **timed(calls, rounds, clock=time.process_time),
        "median_steps": float(jnp.median(steps)), "most_steps": int(steps.max()),
        "failed": {name: int((found[name].reason != 0).sum()) for name in ("vmap", "map")},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table of CPU seconds and their ratio."""
    header = ["problem", "method", "size", "vmap", "lax.map", "lax.map ÷ vmap", "vmap ÷ one"]
    lines = []
    for row in rows:
        one, vmap, own = (row["seconds"][name] for name in ("one", "vmap", "map"))
        lines.append([
            row["problem"], row["method"], row["size"], f"{vmap:.2f}", f"{own:.2f}",
            f"{own / vmap:.2f}", f"{vmap / one:.0f}",
            f"{row['median_steps']:.0f}, {row['most_steps']}",
        ])  # fmt: skip
    return markdown_table([*header, "steps: median, most"], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("starts", __doc__, rounds=3)
    parser.add_argument("--problems", nargs="+", default=[p.name for p in PROBLEMS])
    parser.add_argument("--size", type=int, default=10, help="size of the problems")
    parser.add_argument("--starts", type=int, default=100, help="starts of each problem")
    options = parse(parser, argv, beside=(".md",))
    with jax.enable_x64(True):
        rows = [
            measure(problem, method, options.size, options.starts, options.rounds)
            for problem in PROBLEMS
            if problem.name in options.problems
            for method in METHODS
        ]
    settings = {"tolerance": TOLERANCE, "starts": options.starts, "rounds": options.rounds}
    save_with_table(options, settings | {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
