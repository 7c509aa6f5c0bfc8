"""One optimizer step of large transformers, compiled for TPU slices by the TPU's own compiler.

    pip install "manifoldmuon[tpu]"        # the compiler; no TPU is needed
    python -m benchmarks scale              # writes benchmarks/results/scale.*

Nothing runs: what a chip computes, holds and moves is read from the compiled programs. The
matrices q, k, v, o, up and down of all layers are stacked as `jax.lax.scan` wants them, and their
rows are divided over all chips, as in FSDP. Every program is written to the record once it is
compiled; the same command goes on from there.
"""

import dataclasses
import importlib.metadata
import json
import os
import time
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks._command import command
from benchmarks._programs import read
from benchmarks.steps import optimizers
from examples.command import parse, save
from studies.records import plain

EFFORT = -0.9
NAMES = (
    "optax.adam", "optax.contrib.muon", "muon", "manifold_muon, FAST", "manifold_muon, ACCURATE",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Of one chip: bfloat16 FLOP/s, clock, bytes/s of a link in one direction."""

    peak: float
    clock: float
    link: float


CHIPS = {"v5e": Chip(197e12, 1.5e9, 4.5e10), "v5p": Chip(459e12, 1.75e9, 9e10)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A transformer on a slice."""

    layers: int
    width: int
    topology: str

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.width**2

    @property
    def chip(self) -> Chip:
        return CHIPS[self.topology.split(":")[0]]

    @property
    def sides(self) -> list[int]:
        return [int(side) for side in self.topology.split(":")[1].split("x")]

    @property
    def chips(self) -> int:
        return int(np.prod(self.sides))


ROWS = {
    "0.1B-8": Row(12, 768, "v5e:2x4"),
    "1B-8": Row(24, 2048, "v5e:2x4"),
    "1B-64": Row(24, 2048, "v5e:8x8"),
    "7B-64": Row(32, 4096, "v5p:4x4x4"),
    "7B-256": Row(32, 4096, "v5e:16x16"),
    "70B-256": Row(80, 8192, "v5p:4x8x8"),
}


def compiled(row: Row, dtype: str, tx: optax.GradientTransformation, effort: float) -> Any:
    """The step, `update` and `apply_updates`, with parameters and state donated."""
    topology = topologies.get_topology_desc(row.topology, "tpu")
    mesh = Mesh(np.array(topology.devices), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    width = row.width
    inner = dict.fromkeys("qkvo", (width, width))
    inner |= {"up": (4 * width, width), "down": (width, 4 * width)}
    shapes = {name: (row.layers, *shape) for name, shape in inner.items()}

    def placed(x):
        sharding = rows if x.shape in shapes.values() else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: placed(jax.ShapeDtypeStruct(s, dtype)) for name, s in shapes.items()}
    state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
    program = jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda x: x.sharding, (params, state)),
        compiler_options={"exec_time_optimization_effort": effort},
    )
    with jax.set_mesh(mesh):
        return program.lower(params, state, params).compile()


def measure(row: Row, dtype: str, tx: optax.GradientTransformation, effort: float) -> dict:
    """What one chip does in a step, or why the compiler refuses."""
    start, busy = time.perf_counter(), time.process_time()
    try:
        program = compiled(row, dtype, tx, effort)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    seconds = {
        "compile_seconds": time.perf_counter() - start,
        "compile_cpu_seconds": time.process_time() - busy,
    }
    cost, memory, text = program.cost_analysis(), program.memory_analysis(), program.as_text()
    work = read(text)
    return seconds | {
        "cost_analysis": {"flops": cost["flops"], "bytes": cost["bytes accessed"]},
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "flops": {str(passes): flops for passes, flops in work.flops.items()},
        "flops_once": work.flops_once,
        "multiplier_flops": work.multiplier_flops,
        "cycles": work.cycles,
        "collectives": work.collectives,
        "moved": work.moved,
        "collectives_in_loops": work.collectives_in_loops,
        "unknown_loops": work.unknown_loops,
    }
