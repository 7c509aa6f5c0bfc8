"""Compile time and kernels of a step on CPUs and TPUs, compared with Optax's Muon.

    python -m benchmarks compiling    # seven minutes; docs/benchmarks/results/compiling.*

A step is `update` and `apply_updates`, compiled together for the CPU and, if libtpu is
installed, for a TPU chip (no TPU is needed). Times are CPU seconds without the compilation cache;
nothing runs except `check_chain`. Distinct kernels count different fusions, since XLA on CPUs
compiles identical fusions once.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks._harness import command, compile_without_tpus, save_with_table
from benchmarks.steps import MUON, OURS, TREES, optimizers, shapes_of, step_of
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.optim import check_chain, manifold_muon
from studies.display import markdown_table
from studies.program import parse
from tests.oracles.kernels import distinct_kernels

MANY = {f"leaf{i}": (4, 4) for i in range(300)}
SMALL = {"a": (64, 32), "b": (48, 48), "c": (24, 72)}
NAMES = (MUON, *OURS)


def trees() -> dict[str, dict[str, Any]]:
    """Return the shapes of each tree: small leaves, and `steps`' trees except the deepest."""
    found: dict[str, dict[str, Any]] = {"three small leaves": SMALL}
    for layers, width, stacked in (TREES[0], TREES[1], TREES[3]):
        layer = shapes_of(width)
        if stacked:
            found[f"{layers} of {width}, stacked"] = {k: (layers, *x) for k, x in layer.items()}
        else:
            found[f"{layers} of {width}"] = {f"layer{i}": layer for i in range(layers)}
    return found


def lower(function: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """Trace and lower a function for the shapes of the arguments; return the time, too."""
    start = time.process_time()
    lowered = jax.jit(function).lower(*given)
    return lowered, time.process_time() - start


def measure_lowering(name: str) -> dict[str, float]:
    """Trace and lower a step of an optimizer on `MANY`, for the second time."""
    tx: optax.GradientTransformation = optimizers()[name]
    params = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in MANY.items()}
    given = params, jax.eval_shape(tx.init, params), params
    lowered, seconds = [lower(step_of(tx), *given) for _ in range(2)][-1]
    return {"seconds": seconds, "lines": lowered.as_text().count("\n")}


def measure(function: Callable[..., Any], *given: Any) -> dict[str, float]:
    """Compile a function for the shapes of the arguments; return times and program size."""
    lowered, trace_seconds = lower(function, *given)
    start = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    text = compiled.as_text() or ""
    return {
        "trace_seconds": trace_seconds,
        "compile_seconds": done - start,
        "instructions": len(re.findall(r"^ +(?:ROOT )?%[\w.\-]+ = ", text, re.M)),
        "distinct_kernels": distinct_kernels(text),
    }


def measure_tree(shapes: dict[str, Any], device: Any) -> dict[str, dict[str, float]]:
    """Compile a step of each optimizer."""

    def placed(x):
        sharding = SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(
        lambda shape: placed(jax.ShapeDtypeStruct(shape, "float32")),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    found = {}
    for name in NAMES:
        tx: optax.GradientTransformation = optimizers()[name]
        state = jax.tree.map(placed, jax.eval_shape(tx.init, params))
        found[name] = measure(step_of(tx), params, state, params)
    return found


def measure_check() -> float:
    """Return the CPU seconds of `check_chain` on the small leaves, including its runs."""
    geometry, start = Stiefel(), time.process_time()
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SMALL.items()}
    check_chain(manifold_muon(0.1, geometry), geometry, shapes)
    return time.process_time() - start


def table(record: dict[str, Any]) -> str:
    """Return tables of steps relative to Optax, and the time of `check_chain`."""
    steps = []
    for title, rows in (
        ("trace and compile (distinct kernels)", record["steps"]),
        (f"the same for a TPU v5e, libtpu {record.get('libtpu')}", record.get("steps_tpu", {})),
    ):
        lines = []
        for tree, row in rows.items():
            whole = {k: x["trace_seconds"] + x["compile_seconds"] for k, x in row.items()}
            kernels = {k: f"({x['distinct_kernels']})" for k, x in row.items()}
            cells = [f"{whole[k] / whole[MUON]:.2f} {kernels[k]}" for k in NAMES[1:]]
            lines.append([tree, f"{whole[MUON]:.1f} s {kernels[MUON]}", *cells])
        steps += [markdown_table([title, *NAMES], lines)] if lines else []
    lowered = record["lowering"]
    cells = [f"{row['seconds']:.1f} s ({row['lines']:,.0f})" for row in lowered.values()]
    title = f"{len(MANY)} of 4, trace and lowering (lines)"
    steps.append(markdown_table([title, *lowered], [["", *cells]]))
    check = f"`optim.check_chain` of the three small leaves: {record['check_chain']:.1f} s."
    return "\n\n".join((*steps, check))


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse(command("compiling", __doc__), argv, beside=(".md",))
    cast(Any, jax.config).update("jax_enable_compilation_cache", False)
    measure(lambda x: jnp.sin(x @ x), jnp.ones((8, 8)))  # warm up JAX and XLA
    record: dict[str, Any] = {"check_chain": measure_check()}
    record["lowering"] = {name: measure_lowering(name) for name in NAMES}
    places = {"steps": jax.devices("cpu")[0]}
    if find_spec("libtpu"):
        compile_without_tpus()
        record["libtpu"] = importlib.metadata.version("libtpu")
        places["steps_tpu"] = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
    for where, device in places.items():
        record[where] = {tree: measure_tree(shapes, device) for tree, shapes in trees().items()}
    save_with_table(options, record, table(record))


if __name__ == "__main__":
    main()
