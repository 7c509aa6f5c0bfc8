"""Bytes that one step moves between eight devices, by sharding of the parameters.

    python -m benchmarks meshes    # minutes; docs/benchmarks/results/meshes.*

Nothing is timed: the sizes of all collectives' results are read from the compiled program of a
device. The parameters have 18 MiB: eight layers of width 256 (a square, a tall and a wide matrix
each), or stacks of 32 layers of width 128, of 32 experts, or of 4 layers of 8 experts.
"""

import re
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks._harness import command, save_with_table
from benchmarks.steps import RATE, step_of
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import RMSToRMS
from manifoldmuon.optim import manifold_muon, muon
from studies.display import markdown_table
from studies.program import parse

ONE, TWO = {"x": 8}, {"x": 4, "y": 2}
# Mesh, leading axes of the stacks, partition spec.
CASES: dict[str, tuple[dict[str, int], tuple[int, ...], tuple[Any, ...]]] = {
    "rows (FSDP)": (ONE, (), ("x",)),
    "columns": (ONE, (), (None, "x")),
    "replicated": (ONE, (), ()),
    "4 x 2, rows x columns": (TWO, (), ("x", "y")),
    "4 x 2, columns x rows": (TWO, (), ("y", "x")),
    "stack axis": (ONE, (32,), ("x",)),
    "4 x 2, experts x columns": (TWO, (32,), ("x", None, "y")),
    "4 x 2, experts (2) x rows": (TWO, (32,), ("y", "x")),
    "4 x 2, layers, experts x columns": (TWO, (4, 8), (None, "x", None, "y")),
    "4 x 2, layers, rows x columns": (TWO, (32,), (None, "x", "y")),
    "4 x 2, layers, columns x rows": (TWO, (32,), (None, "y", "x")),
}
OPTIMIZERS = {
    "muon": lambda: muon(RATE, Euclidean(RMSToRMS())),
    "manifold_muon": lambda: manifold_muon(RATE, Stiefel(solver=ProjectedPolar())),
}
# "declared" axes are automatic outside the update and explicit within.
AXES = {"automatic": AxisType.Auto, "declared": AxisType.Auto, "explicit": AxisType.Explicit}
FASTER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
BYTES = {"pred": 1, "bf16": 2, "s32": 4, "f32": 4}


def shapes_of(lead: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters."""
    d = 128 if lead else 256
    matrices = {"square": (d, d), "tall": (4 * d, d), "wide": (d, 4 * d)}
    if lead:
        return {name: (*lead, *shape) for name, shape in matrices.items()}
    return {f"{name}{i}": shape for name, shape in matrices.items() for i in range(8)}


def moved(text: str) -> dict[str, int]:
    """Return the bytes in the results of a compiled program's collectives, by kind."""
    kinds = r"= (.*?) (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
    found: dict[str, int] = {}
    for shapes, kind in re.findall(kinds + r"(?:-start)?\(", text):
        for dtype, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shapes):
            entries = int(np.prod([int(n) for n in sizes.split(",") if n]))
            found[kind] = found.get(kind, 0) + BYTES[dtype] * entries
    return found


def measure(case: str, axes: str, tx: optax.GradientTransformation) -> dict[str, int]:
    """Return the bytes that a device receives in a step, by kind of collective."""
    sizes, lead, spec = CASES[case]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AXES[axes],) * len(sizes))
    shapes = shapes_of(lead)

    def placed(x, mesh: Mesh):
        own = PartitionSpec(*spec) if x.shape in shapes.values() else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, own))

    plain = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, plain)
    params, state = jax.tree.map(lambda x: placed(x, mesh), (plain, state))
    if axes == "declared":
        specs, own = jax.tree.map(lambda x: x.sharding.spec, (params, state))
        update: Any = jax.sharding.explicit_axes(
            tx.update, axes=mesh.axis_names, in_sharding=(specs, own, specs)
        )
        tx = optax.GradientTransformation(tx.init, update)
    with jax.set_mesh(mesh):
        program = jax.jit(step_of(tx)).lower(params, state, params).compile(FASTER)
    return moved(program.as_text() or "")


def table(rows: list[dict]) -> str:
    """Return a table in MiB, with a line for each sharding."""
    header = ["divided by", *(f"`{name}`, {axes}" for name in OPTIMIZERS for axes in AXES)]
    moved = {
        (row["case"], row["optimizer"], row["axes"]): sum(row["moved"].values()) for row in rows
    }
    lines = [
        [case, *(f"{moved[case, name, axes] / 2**20:.2f}" for name in OPTIMIZERS for axes in AXES)]
        for case in dict.fromkeys(row["case"] for row in rows)
    ]
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("meshes", __doc__)
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parse(p, argv, beside=(".md",))
    rows = []
    for case in tqdm(options.cases, unit="case"):
        for axes in AXES:
            for name, make in OPTIMIZERS.items():
                found = measure(case, axes, make())
                rows.append({"case": case, "axes": axes, "optimizer": name, "moved": found})
    save_with_table(options, {"rows": rows}, table(rows))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    main()
