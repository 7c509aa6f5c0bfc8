"""Seconds of the first step on three small layers, each in a new process, compared with Optax.

    python -m benchmarks first_step    # two minutes; docs/benchmarks/results/first_step.*

The first step is `tx.init`, and `update` with `apply_updates`: traced, compiled without a cache,
and run. Importing and starting JAX are not counted. Rounds are interleaved, and figures are minima.
Needs a quiet machine: XLA compiles on every core.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._harness import command, save_with_table
from benchmarks.compiling import SMALL
from benchmarks.steps import MUON, OURS, RATE, optimizers, step_of
from studies.display import markdown_table
from studies.program import parse

NAMES = (
    "optax.adamw",
    MUON,
    "optim.optax_muon",
    *OURS,
    "manifold_muon, track_gap=False",
)
PARTS = ("init", "trace and compile", "run")


def transformation(name: str) -> optax.GradientTransformation:
    """Return the optimizer of a row."""
    if name == "optax.adamw":
        return optax.adamw(RATE)
    if name == "manifold_muon, track_gap=False":
        return mm.optim.manifold_muon(RATE, mm.manifolds.Stiefel(), track_gap=False)
    return optimizers()[name]


def measure(name: str) -> dict[str, float]:
    """Take the first step of this process; return the seconds of each part."""
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(orthonormal(rng, shape)) for k, shape in SMALL.items()}
    grads = {k: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for k, x in params.items()}
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((8, 8))))  # start the backend
    tx, clock = transformation(name), time.perf_counter
    start = clock()
    state = jax.block_until_ready(tx.init(params))
    times = [start, clock()]
    step = jax.jit(step_of(tx)).lower(params, state, grads).compile()
    times.append(clock())
    jax.block_until_ready(step(params, state, grads))
    times.append(clock())
    return dict(zip(PARTS, map(float, np.diff(times)), strict=True))


def orthonormal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a matrix with orthonormal columns or rows."""
    tall = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))[0].astype(np.float32)
    return tall if shape[0] >= shape[1] else tall.T


def in_new_process(name: str) -> dict[str, float]:
    """Call `measure` in a new process."""
    line = [sys.executable, "-m", "benchmarks.first_step", "--row", name, "--overwrite"]
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(line, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return a table of seconds, and of totals relative to Optax's Muon."""
    whole = {name: sum(parts.values()) for name, parts in rows.items()}
    lines = [
        [name, *(f"{parts[part]:.2f}" for part in PARTS), f"{whole[name]:.2f}",
         f"{whole[name] / whole[MUON]:.2f}"]
        for name, parts in rows.items()
    ]  # fmt: skip
    return markdown_table(["seconds", *PARTS, "total", "relative"], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("first_step", __doc__, rounds=5)
    p.add_argument("--row", choices=NAMES, help="take the first step of a row, and print its parts")
    options = parse(p, argv, beside=(".md",))
    if options.row:
        print(json.dumps(measure(options.row)))
        return
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for _ in tqdm(range(options.rounds), unit="round"):
        for name in NAMES:
            found[name].append(in_new_process(name))
    rows = {name: {part: min(x[part] for x in found[name]) for part in PARTS} for name in NAMES}
    record = {"rounds": options.rounds, "rows": rows}
    save_with_table(options, record, table(rows))


if __name__ == "__main__":
    main()
