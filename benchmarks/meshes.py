"""Work of a step on eight devices, by sharding of the parameters, compared with Optax.

    python -m benchmarks meshes    # minutes; docs/benchmarks/results/meshes.*

Nothing is timed: the bytes that a device receives, and the flops of its matrix products, are read
from its compiled program. The parameters have 18 MiB: eight layers of width 256 (a square, a tall
and a wide matrix each), or stacks of 32 layers of width 128, of 32 experts, or of 4 layers of 8
experts.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks._harness import command, save_with_table
from benchmarks._programs import Work, read
from benchmarks.steps import MUON, optimizers, step_of
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
# "declared" axes are automatic outside the update and explicit within.
AXES = {"automatic": AxisType.Auto, "declared": AxisType.Auto, "explicit": AxisType.Explicit}
DROP_IN, STIEFEL = "optim.optax_muon", "manifold_muon, ProjectedPolar()"
COLUMNS = (
    (MUON, "automatic"),
    (DROP_IN, "automatic"),
    *(("muon", axes) for axes in AXES),
    *((name, "automatic") for name in ("muonh", "adamh")),
    *((STIEFEL, axes) for axes in AXES),
)
FASTER = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def shapes_of(lead: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters."""
    d = 128 if lead else 256
    matrices = {"square": (d, d), "tall": (4 * d, d), "wide": (d, 4 * d)}
    if lead:
        return {name: (*lead, *shape) for name, shape in matrices.items()}
    return {f"{name}{i}": shape for name, shape in matrices.items() for i in range(8)}


def work_of(case: str, name: str, axes: str) -> Work:
    """Return the work of a device in a step."""
    sizes, lead, spec = CASES[case]
    tx = optimizers()[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AXES[axes],) * len(sizes))
    shapes = shapes_of(lead)

    def placed(x, mesh: Mesh):
        own = PartitionSpec(*spec) if x.shape in shapes.values() else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, own))

    params, state = jax.tree.map(lambda x: placed(x, mesh), plain(tx, shapes))
    if axes == "declared":
        specs, own = jax.tree.map(lambda x: x.sharding.spec, (params, state))
        update: Any = jax.sharding.explicit_axes(
            tx.update, axes=mesh.axis_names, in_sharding=(specs, own, specs)
        )
        tx = optax.GradientTransformation(tx.init, update)
    with jax.set_mesh(mesh):
        return compiled_work(tx, params, state)


def plain(tx: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Return the shapes of parameters and state."""
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    return params, jax.eval_shape(tx.init, params)


def compiled_work(tx: optax.GradientTransformation, params: Any, state: Any) -> Work:
    """Compile a step, and return its work."""
    program = jax.jit(step_of(tx)).lower(params, state, params).compile(FASTER)
    return read(program.as_text() or "")


@functools.cache
def flops_alone(name: str, lead: tuple[int, ...]) -> float:
    """Return the flops of a step on a single device."""
    tx = optimizers()[name]
    return compiled_work(tx, *plain(tx, shapes_of(lead))).multiplier_flops


def table(rows: list[dict]) -> str:
    """Return a table of MiB and relative flops, with a line for each sharding."""
    cells = {
        (row["case"], row["optimizer"], row["axes"]): (
            f"{sum(row['received'].values()) / 2**20:.2f} ({row['flops_of_share']:.2f})"
        )
        for row in rows
    }
    lines = [
        [case, *(cells[case, *column] for column in COLUMNS)]
        for case in dict.fromkeys(row["case"] for row in rows)
    ]
    names = [f"`{name.removesuffix(', ProjectedPolar()')}`, {axes}" for name, axes in COLUMNS]
    return markdown_table(["divided by", *names], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("meshes", __doc__)
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    options = parse(p, argv, beside=(".md",))
    rows = []
    for case in tqdm(options.cases, unit="case"):
        for name, axes in COLUMNS:
            work, alone = work_of(case, name, axes), flops_alone(name, CASES[case][1])
            received = {kind: size for kind, (_, size) in work.collectives.items()}
            row = {"case": case, "axes": axes, "optimizer": name, "received": received}
            share = 8 * work.multiplier_flops / alone if alone else 0.0  # adamh has no products
            rows.append(row | {"flops_of_share": share})
    save_with_table(options, {"rows": rows}, table(rows))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    main()
