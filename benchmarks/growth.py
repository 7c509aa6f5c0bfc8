"""Growth of a step and its compilation with width, leaves, copies in a stack, and devices.

    python -m benchmarks growth    # ten minutes; docs/benchmarks/results/growth.*

A tree holds square matrices and grows along one axis at a time. Times are CPU seconds; steps are
medians of interleaved rounds. Memory is the compiler's temporary memory, without parameters,
gradients and state. The widest matrices are compiled only, and so are programs for several devices,
which are emulated on a CPU, in a new interpreter for each number, with rows divided.
"""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks._command import command, save_with_table
from benchmarks.steps import MUON, optimizers, step_of
from studies.display import dress, markdown_table, panels
from studies.estimates import slope_estimate
from studies.program import parse
from studies.timing import interleaved_seconds

OURS = ("muon", "manifold_muon, FAST", "manifold_muon, ACCURATE")
SIDE = 64  # side of the matrices that grow in number
DIVIDED = (64, 128)  # number and side of the matrices divided over devices
AXES: dict[str, tuple[int, ...]] = {
    "width": (64, 128, 256, 512, 1024, 2048, 8192),
    "leaves": (1, 10, 100, 1000),
    "copies": (1, 10, 100, 1000),
    "devices": (1, 4, 16, 64),
}
PEERS = 100  # most leaves for Optax, which compiles a thousand for minutes
TITLES = {
    "width": "one square matrix",
    "leaves": f"matrices of {SIDE} x {SIDE}, each by itself",
    "copies": f"matrices of {SIDE} x {SIDE} in one stack",
    "devices": f"{DIVIDED[0]} matrices of {DIVIDED[1]} x {DIVIDED[1]}, rows divided",
}
MEASURED = {
    "seconds": "one step, processor seconds",
    "compile_seconds": "trace and compile, processor seconds",
    "memory": "temporary memory of a device, MB",
    "moved": "received by a device, MB",
}


def tree(axis: str, size: int, seed: int) -> dict[str, Any]:
    """Draw Gaussian matrices of variance 1 / side."""
    count, side = {"width": (1, size), "devices": DIVIDED}.get(axis, (size, SIDE))
    rng = np.random.default_rng(seed)
    stack = (rng.standard_normal((count, side, side)) / math.sqrt(side)).astype(np.float32)
    return {"stack": stack} if axis == "copies" else {f"w{i}": x for i, x in enumerate(stack)}


def grown(
    axis: str, size: int, names: tuple[str, ...], rounds: int, run: bool = True
) -> dict[str, Any]:
    """Measure a tree by quantity and optimizer; `run` also times the step."""
    place: Any = None
    if axis == "devices":
        mesh = jax.make_mesh((size,), ("x",), (AxisType.Auto,))
        place = NamedSharding(mesh, PartitionSpec("x"))
        jax.set_mesh(mesh)
    params, grads = (tree(axis, size, seed) for seed in (0, 1))
    if run:  # on the manifold
        params = jax.tree.map(lambda x: np.linalg.qr(x).Q, params)
    params, grads = jax.device_put((params, grads), place)
    found: dict[str, Any] = {name: {} for name in MEASURED if run or name != "seconds"}
    steps = {}
    for name in names:
        if name == MUON and axis == "leaves" and size > PEERS:
            continue
        tx = optimizers()[name]
        state, start = jax.jit(tx.init)(params), time.process_time()
        program = jax.jit(step_of(tx)).lower(params, state, grads).compile()
        found["compile_seconds"][name] = time.process_time() - start
        memory: Any = program.memory_analysis()
        found["memory"][name] = memory.temp_size_in_bytes / 1e6
        found["moved"][name] = received(program.as_text() or "", size) / 1e6
        steps[name] = functools.partial(program, params, state, grads)
    if run:
        found["seconds"] = interleaved_seconds(steps, rounds, clock=time.process_time)
    if axis != "devices":
        del found["moved"]
    return {"grows": axis, "size": size, **found}


def received(text: str, devices: int) -> float:
    """Return the bytes that a device receives in all collectives; assumes none is in a loop."""
    kinds = r"= (.*?) (?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
    total = 0
    for result in re.findall(kinds + r"(?:-start)?\(", text):
        for sizes in re.findall(r"(?:f32|s32)\[([\d,]*)\]", result):
            total += 4 * math.prod(int(n) for n in sizes.split(",") if n)
    return total * (1 - 1 / devices)


def on_devices(size: int) -> dict[str, Any]:
    """Return the row for a number of devices, from a new interpreter with that many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={size}"
    given = [sys.executable, "-m", "benchmarks.growth", "--overwrite", "--devices", f"{size}"]
    done = subprocess.run(
        given,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout.splitlines()[-1])


def exponent(rows: list[dict], axis: str, quantity: str, name: str) -> float | None:
    """Return the log-log slope of a quantity over the last four sizes."""
    own = [row for row in rows if row["grows"] == axis and name in row.get(quantity, {})]
    own = [row for row in own if row[quantity][name] > 0][-4:]
    if len(own) < 3:
        return None
    sizes = [math.log(row["size"]) for row in own]
    return slope_estimate(sizes, [math.log(row[quantity][name]) for row in own]).value


def table(rows: list[dict]) -> str:
    """Return Markdown tables of the exponents, and of memory and traffic per device."""
    names, parts = (MUON, *OURS), []
    lines = []
    for axis in dict.fromkeys(row["grows"] for row in rows):
        for quantity, label in MEASURED.items():
            found = [exponent(rows, axis, quantity, name) for name in names]
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            lines += [[axis, label.split(",")[0], *cells]] if any(cells) else []
    parts.append(markdown_table(["exponent in", "of", *names], lines))
    divided = [row for row in rows if row["grows"] == "devices"]
    if divided:
        header = ["devices", *(f"{name}: {label}" for name in OURS for label in ("MB", "moved"))]
        lines = [
            [str(row["size"]),
             *(f"{row[what][name]:.2f}" for name in OURS for what in ("memory", "moved"))]
            for row in divided
        ]  # fmt: skip
        parts.append(markdown_table(header, lines))
    return "\n\n".join(parts)


def plot(rows: list[dict]) -> Figure:
    """Plot a column per axis: time of a step, compile time, memory and bytes received."""
    axes = list(dict.fromkeys(row["grows"] for row in rows))
    figure, grid = panels(len(MEASURED), len(axes))
    for line, (quantity, label) in zip(grid, MEASURED.items(), strict=True):
        for panel, axis in zip(line, axes, strict=True):
            own = [row for row in rows if row["grows"] == axis and quantity in row]
            for i, name in enumerate((MUON, *OURS)):
                some = [row for row in own if row[quantity].get(name, 0) > 0]
                if some:
                    across = [row["size"] for row in some]
                    panel.loglog(
                        across,
                        [row[quantity][name] for row in some],
                        "o-",
                        color=f"C{i}",
                        label=name,
                    )
            if not own:
                panel.set_axis_off()
                continue
            panel.set_xticks([row["size"] for row in own], [str(row["size"]) for row in own])
            panel.minorticks_off()
            dress(panel, axis, TITLES[axis], axis, label)
    grid[0, 0].legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("growth", "How a step and its compilation grow.")
    p.add_argument("--rounds", type=int, default=2, help="timed rounds (default: %(default)s)")
    p.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    p.add_argument("--widest", type=int, default=1024, metavar="WIDTH",
                   help="that is run, and not only compiled (default: %(default)s)")  # fmt: skip
    p.add_argument("--most", type=int, default=1000, metavar="LEAVES",
                   help="that are compiled one by one (default: %(default)s)")  # fmt: skip
    p.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parse(p, argv, beside=(".md", ".png"))
    if options.devices:
        print(json.dumps(grown("devices", options.devices, OURS, 0, run=False)))
        return
    rows: list[dict[str, Any]] = []
    for axis in options.axes:
        for size in tqdm(AXES[axis], desc=axis, unit="tree"):
            if axis == "devices":
                rows.append(on_devices(size))
            elif axis != "leaves" or size <= options.most:
                run = axis != "width" or size <= options.widest
                rows.append(grown(axis, size, (MUON, *OURS), options.rounds, run))
    save_with_table(options, {"rounds": options.rounds, "rows": rows}, table(rows))
    plot(rows).savefig(options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
