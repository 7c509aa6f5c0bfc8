"""Work, traffic and memory of a step on TPU slices, for up to 64 billion parameters.

    pip install '.[tpu]'    # the compiler; no TPU is needed
    python -m benchmarks scale    # tens of minutes; docs/benchmarks/results/scale.*

Nothing runs: the TPU's own compiler compiles the programs, and their costs are read from them. The
matrices q, k, v, o, up and down of all layers are stacked as for `jax.lax.scan`, and their rows are
divided over all chips, as in FSDP. Experts are divided over one mesh axis, and their columns over
the other. The record is saved after every compiled program; the same command resumes from it.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks._harness import command, compile_without_tpus
from benchmarks._programs import read
from benchmarks.balance import busiest, cost, owned
from benchmarks.steps import ADAM, MUON, OURS, optimizers, shapes_of, step_of
from studies.display import markdown_table
from studies.program import interrupted, parse, save
from studies.records import plain

NAMES = (ADAM, MUON, *OURS)
DTYPES = ("float32", "bfloat16")
# At full effort programs compile for minutes, mostly searching for the fastest tiling of each
# product. Reduced effort skips the search, and overlaps no collectives with products. JAX 0.12
# renamed the option.
REDUCED = (
    {"exec_time_optimization_effort": -0.5}
    if "jax_exec_time_optimization_effort" in jax.config.values
    else {"optimization_level": "O1"}
)
EFFORTS = {"reduced": REDUCED, "full": None}
KEYS = ("row", "dtype", "effort", "optimizer")
TOKENS = 16384
UTILISATION = 0.5


@dataclasses.dataclass(frozen=True)
class Chip:
    """Chip: bfloat16 FLOP/s, memory bytes/s, link bytes/s in one direction.

    The sides of a slice close to rings if they are a multiple of `ring`.
    """

    peak: float
    memory: float
    link: float
    ring: int


CHIPS = {"v5e": Chip(197e12, 8.19e11, 4.5e10, 16), "v5p": Chip(459e12, 2.765e12, 9e10, 4)}


@dataclasses.dataclass(frozen=True)
class Row:
    """Transformer on a slice.

    Attributes:
      layers, width: dimensions of the transformer.
      topology: topology of the slice.
      experts: pairs of up and down matrices per layer; 0 for a single pair of width 4 `width`.
      hidden: width of an expert.
      active: experts that process each token.
      parts: number of parts into which a layer's experts are divided.
    """

    layers: int
    width: int
    topology: str
    experts: int = 0
    hidden: int = 0
    active: int = 0
    parts: int = 1

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stacked matrices."""
        shapes = {name: (self.layers, *shape) for name, shape in shapes_of(self.width).items()}
        if self.experts:
            lead = self.layers, self.experts
            shapes |= {"up": (*lead, self.hidden, self.width)}
            shapes |= {"down": (*lead, self.width, self.hidden)}
        return shapes

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def taken(self) -> int:
        """Parameters used by each token."""
        idle = self.experts - self.active
        return self.parameters - 2 * idle * self.layers * self.hidden * self.width

    def spec(self, ndim: int) -> PartitionSpec:
        """Return the partition spec of stacks with `ndim` axes."""
        if ndim == 4:
            return PartitionSpec(None, "experts", None, "fsdp")
        return PartitionSpec(None, ("experts", "fsdp") if self.experts else "fsdp")

    def mesh(self, chips: Sequence[Any]) -> Mesh:
        """Return the slice's mesh, with an axis over the parts if there are experts."""
        names = ("experts", "fsdp") if self.experts else ("fsdp",)
        devices = np.array(chips).reshape((self.parts, -1) if self.experts else -1)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def busiest(self) -> float:
        """Busiest chip's work, relative to a chip with the largest count of every kind."""
        given = owned(self.mesh(jax.devices()[: self.chips]), self.shapes.values())
        most: Counter[tuple[int, int]] = Counter()
        for (_, m, n), number in given.items():
            most[m, n] = max(most[m, n], number)
        return busiest(given) / sum(number * cost(m, n) for (m, n), number in most.items())

    @property
    def chip(self) -> Chip:
        return CHIPS[self.topology.split(":")[0]]

    @property
    def sides(self) -> list[int]:
        return [int(side) for side in self.topology.split(":")[1].split("x")]

    @property
    def chips(self) -> int:
        return int(np.prod(self.sides))

    @property
    def training_seconds(self) -> float:
        """Seconds of the forward and backward products, for `TOKENS` tokens per chip."""
        return 6 * self.taken * TOKENS / (UTILISATION * self.chip.peak)


ROWS = {
    "0.1B-8": Row(12, 768, "v5e:2x4"),
    "1B-8": Row(24, 2048, "v5e:2x4"),
    "1B-64": Row(24, 2048, "v5e:8x8"),
    "7B-64": Row(32, 4096, "v5p:4x4x4"),
    "70B-256": Row(80, 8192, "v5p:4x8x8"),
    "64B-experts-256": Row(38, 4096, "v5p:4x8x8", experts=128, hidden=1536, active=8, parts=64),
}


def compiled(
    row: Row, topology: Any, dtype: str, tx: optax.GradientTransformation, options: Any = None
) -> Any:
    """Compile the step, `update` and `apply_updates`, with donated parameters and state."""
    mesh, shapes = row.mesh(topology.devices), row.shapes

    def placed(x):
        spec = row.spec(x.ndim) if x.shape in shapes.values() else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = {name: placed(jax.ShapeDtypeStruct(s, dtype)) for name, s in shapes.items()}
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
    program = jax.jit(
        step_of(tx),
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda x: x.sharding, (params, state)),
        compiler_options=options,
    )
    with jax.set_mesh(mesh):
        return program.lower(params, state, params).compile()


def measure(row: Row, dtype: str, tx: optax.GradientTransformation, options: Any) -> dict:
    """Return the work per chip in a step, or the compiler's error."""
    topology = topologies.get_topology_desc(row.topology, "tpu")
    start, busy = time.perf_counter(), time.process_time()
    try:
        program = compiled(row, topology, dtype, tx, options)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    seconds = {
        "compile_seconds": time.perf_counter() - start,
        "compile_cpu_seconds": time.process_time() - busy,
    }
    return seconds | costs(program)


def costs(program: Any) -> dict[str, Any]:
    """Return the work per chip of a compiled program."""
    cost, memory, text = program.cost_analysis(), program.memory_analysis(), program.as_text()
    work, most, keys = read(text), read(text, max), ("flops_once", "multiplier_flops", "cycles")
    return {
        "cost_analysis": {"flops": cost["flops"], "bytes": cost["bytes accessed"]},
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "flops": {str(passes): flops for passes, flops in work.flops.items()},
        **{key: getattr(work, key) for key in keys},
        "costliest_branches": {key: getattr(most, key) for key in keys},
        "collectives": work.collectives,
        "moved": work.moved,
        "collectives_in_loops": work.collectives_in_loops,
        "unknown_loops": work.unknown_loops,
    }


def link_seconds(row: Row, collectives: dict[str, list[float]]) -> float:
    """Return a lower bound for all collectives, run sequentially without overlapping products.

    Gathers and reductions keep every link of a chip busy. All-to-alls are limited by the middle of
    the longest side: half of a line's chips send half of their data across it.
    """
    chip, sides = row.chip, [side for side in row.sides if side > 1]
    ways = [2 if side % chip.ring == 0 else 1 for side in sides]
    across = max(side / (4 * way) for side, way in zip(sides, ways, strict=True))
    return sum(
        size / chip.link * (across if kind == "all-to-all" else 1 / sum(ways))
        for kind, (_, size) in collectives.items()
    )


def least_seconds(row: Row, cell: dict, share: float = 1.0) -> dict[str, float]:
    """Return times for products at peak, one read and write of every array, and full-speed links.

    Args:
      row: model and slice.
      cell: result of `measure`; its products are for a chip with the largest count of every kind.
      share: `row.busiest` for optimizers that divide matrices; otherwise 1.
    """
    return {
        "products": share * cell["multiplier_flops"] / row.chip.peak,
        "memory": (cell["arguments"] + cell["outputs"]) / row.chip.memory,
        "links": link_seconds(row, cell["collectives"]),
    }


def table(cells: list[dict]) -> str:
    """Return a table of the work per chip, with a line for each program."""
    lines = []
    for cell in cells:
        effort = ", full effort" if cell["effort"] == "full" else ""
        head = [label(ROWS[cell["row"]]), f"{cell['dtype']}{effort}", cell["optimizer"]]
        if "error" in cell:
            lines.append([*head, cell["error"].replace("|", "/"), *[""] * 6])
            continue
        flops = sum(cell["flops"].values()), cell["multiplier_flops"]
        kinds = ", ".join(f"{n:.0f} {kind}" for kind, (n, _) in cell["collectives"].items())
        moved, kept = (f"{short(cell[key] / 1e9)} GB" for key in ("moved", "temporary"))
        lines.append([
            *head, *(short(x / 1e12) for x in flops), moved, kinds,
            cell["collectives_in_loops"] if kinds else "", kept,
            f"{cell['compile_cpu_seconds']:.0f} s",
        ])  # fmt: skip
    header = ["model, slice", "parameters", "optimizer", "TFLOP", "times passes", "moved"]
    return markdown_table([*header, "collectives", "in loops", "temporary", "compile"], lines)


def overheads(cells: list[dict], shares: dict[str, float]) -> str:
    """Return a table of the minimum overhead of a step, in percent of the training step's passes,
    at full effort where a program was compiled so.

    Args:
      cells: cells of the record.
      shares: `Row.busiest` of each row, for optimizers that divide matrices.
    """
    done = [cell for cell in cells if "error" not in cell]  # full effort comes last
    lines = []
    for key, dtype in itertools.product(ROWS, DTYPES):
        row, found = ROWS[key], {}
        for cell in done:
            if (cell["row"], cell["dtype"]) == (key, dtype):
                share = 1.0 if cell["optimizer"] == MUON else shares[key]
                seconds = least_seconds(row, cell, share)
                parts = {k: 100 * s / row.training_seconds for k, s in seconds.items()}
                found[cell["optimizer"]] = (
                    f"{sum(parts.values()):.2g} % ({parts['products']:.2g} + {parts['links']:.2g})"
                )
        if found:
            entries = [found.get(name, "") for name in NAMES]
            lines.append([label(row), dtype, f"{row.training_seconds:.3g} s", *entries])
    return markdown_table(["model, slice", "parameters", "training step", *NAMES], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("scale", __doc__)
    p.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW",
                   help=f"rows to compile: {', '.join(ROWS)} (default: all)")  # fmt: skip
    p.add_argument("--full", nargs="*", choices=ROWS, default=["0.1B-8", "1B-8"], metavar="ROW",
                   help="rows to compile at full effort, too (default: 0.1B-8 1B-8)")  # fmt: skip
    p.add_argument("--bfloat16", nargs="*", choices=ROWS, default=["70B-256"], metavar="ROW",
                   help="rows to compile in bfloat16, too (default: 70B-256)")  # fmt: skip
    p.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    given = parse(p, argv, resumes=True)
    if importlib.util.find_spec("libtpu") is None:
        print("scale: skipped, for want of the TPU's compiler; pip install '.[tpu]'")
        return
    compile_without_tpus()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(row.chips for row in ROWS.values()))
    try:
        measure_all(given)
    except KeyboardInterrupt:
        sys.exit(interrupted(f"what was compiled is kept in {given.out}"))


def measure_all(given: argparse.Namespace) -> None:
    """Complete the record and write the tables next to it."""
    cells: list[dict] = []
    if given.out.exists() and not given.overwrite:
        cells = json.loads(given.out.read_text(encoding="utf-8"))["cells"]
    programs = (
        ("float32", "reduced", given.rows),
        ("bfloat16", "reduced", [row for row in given.bfloat16 if row in given.rows]),
        ("float32", "full", given.full),
    )
    wanted = [
        {"row": row, "dtype": dtype, "effort": effort, "optimizer": name}
        for dtype, effort, rows in programs
        for row, name in itertools.product(rows, given.only)
    ]
    done = [{key: cell[key] for key in KEYS} for cell in cells]
    for what in tqdm([w for w in wanted if w not in done], unit="program"):
        tx = optimizers()[what["optimizer"]]
        found = measure(ROWS[what["row"]], what["dtype"], tx, EFFORTS[what["effort"]])
        cells.append(plain(what | found))
        save(given, record(cells), replace=True)
    cells.sort(key=order)
    shares = {key: ROWS[key].busiest for key in dict.fromkeys(cell["row"] for cell in cells)}
    save(given, record(cells) | {"busiest": shares}, replace=True)
    for ending, text in ((".md", table(cells)), (".overheads.md", overheads(cells, shares))):
        print(text)
        given.out.with_suffix(ending).write_text(f"{text}\n", encoding="utf-8")


def record(cells: list[dict]) -> dict[str, Any]:
    """Return the record of compiled programs."""
    return {"libtpu": importlib.metadata.version("libtpu"), "cells": cells}


def order(cell: dict) -> tuple[int, ...]:
    """Return the sort key of a cell in the tables."""
    ranks = (ROWS, "row"), (DTYPES, "dtype"), (EFFORTS, "effort"), (NAMES, "optimizer")
    return tuple(list(values).index(cell[key]) for values, key in ranks)


def short(x: float) -> str:
    """Format with three significant digits, or all digits before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def label(row: Row) -> str:
    """Return the name of a row in a table."""
    kind = f" in {row.experts} experts" if row.experts else ""
    return f"{row.parameters / 1e9:.2g} B{kind}, {row.topology.replace(':', ' ')}"


if __name__ == "__main__":
    main()
