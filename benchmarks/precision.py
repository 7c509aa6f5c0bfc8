"""Cost and error of products in one, three or six bfloat16 passes, emulated on a CPU.

    python -m benchmarks precision    # ten minutes; docs/benchmarks/results/precision.*

A TPU computes a float32 product in one, three or six passes of bfloat16. Methods run with one,
three or six passes in every product, and as delivered, where each product sets its own number;
`tests.oracles.passes` rounds the factors as a TPU does. Costs are multiplications in passes,
relative to the five steps of `optax.contrib.muon`, which take one pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks._gradients import record_gradients
from benchmarks._harness import command, save_with_table
from benchmarks._polar_methods import GramEigh, InverseRoot
from benchmarks.drift import PRESETS, last_tenth, rate_of, walk
from benchmarks.msign_accuracy import matrix
from benchmarks.solvers import muon_direction
from manifoldmuon import optim
from manifoldmuon.linalg import DEFAULT_MSIGN, TRAINING_MSIGN, msign
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar, SkewPolar, StiefelSolver
from studies.display import markdown_table
from studies.program import parse
from tests.oracles.passes import multiplications, on_tpu
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

PASSES = {"as delivered": None, "1": 1, "3": 3, "6": 6}
SHAPES = ((256, 64), (80, 64), (64, 64))
LARGE = 0.05  # relative to the largest: each method here brings these to 1 in float32
LAST, LAST_OF_COPIES = "in the last tenth", "of the copies, in the last tenth"

POLAR = {
    "optax.contrib.muon": muon_direction,
    "TRAINING_MSIGN": functools.partial(msign, method=TRAINING_MSIGN),
    "DEFAULT_MSIGN": functools.partial(msign, method=DEFAULT_MSIGN),
    "GramEigh()": functools.partial(msign, method=GramEigh()),
    "InverseRoot()": functools.partial(msign, method=InverseRoot()),
}
EXACT: dict[str, StiefelSolver] = {
    "ProjectedPolar(HIGHEST)": ProjectedPolar(precision=jax.lax.Precision.HIGHEST),
    "SkewPolar()": SkewPolar(),
}
SOLVERS = PRESETS | EXACT
# Preset, passes, shape, and the parameters' dtype.
WALKS = [
    *[("ProjectedPolar()", passes, (128, 64), "float32") for passes in PASSES],
    *[("ClosedForm()", "as delivered", shape, "float32") for shape in ((64, 10), (128, 64))],
    *[
        ("ProjectedPolar()", "as delivered", (64, 64), d)
        for d in ("float32", "bfloat16", "master copies")
    ],
]


def cost(function, shape: tuple[int, int], passes: int | None, arguments: int) -> float:
    """Return multiplications in passes, relative to Optax's five steps."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    own = multiplications(function, *[like] * arguments, passes=passes)
    return own / multiplications(muon_direction, like, passes=1)


def polar_row(name: str, passes: str) -> dict:
    """Return the worst errors of a method over shapes and spectra."""
    function = jax.jit(on_tpu(POLAR[name], PASSES[passes]))
    miss, largest = [], []
    for shape in ((256, 64), (128, 128)):
        gaussian = np.random.default_rng(0).standard_normal(shape)
        for x in (gaussian, matrix(shape, 20.0), matrix(shape, 1e3)):
            found = np.nan_to_num(np.asarray(function(jnp.float32(x)), np.float64), nan=1e30)
            left, values, right = np.linalg.svd(np.float32(x).astype(np.float64), False)
            reached = np.diag(left.T @ found @ right.T)[values > LARGE * values[0]]
            miss.append(np.abs(reached - 1).max())
            largest.append(np.linalg.norm(found, 2))
    row = {"method": name, "passes": passes}
    row |= {"cost": cost(POLAR[name], (1024, 256), PASSES[passes], 1)}
    return row | {"error": float(np.max(miss)), "norm": float(np.max(largest))}


def solver_row(name: str, passes: str, group: str, pairs: list) -> dict:
    """Return a solver's largest gap and residual over problems."""

    def direction(point, grad):
        return Stiefel(solver=SOLVERS[name]).steepest(point, grad, ()).direction

    solve, shape = jax.jit(on_tpu(direction, PASSES[passes])), pairs[0][0].shape
    found = [
        stiefel_errors(point, grad, np.nan_to_num(solve(point, grad), nan=1e30))
        for point, grad in pairs
    ]
    return {
        "solver": name,
        "passes": passes,
        "gradients": group,
        "cost": cost(direction, shape, PASSES[passes], 2),
        "gap": float(np.max([errors.gap for errors in found])),
        "residual": float(np.max([errors.residual for errors in found])),
    }


def problems_of(steps: int) -> dict[str, list]:
    """Return tall float32 points and gradients: the families by shape, and from the main job."""
    groups: dict[str, list] = {}
    for m, n in SHAPES:
        pairs = [stiefel_problem(family, m, n) for family in STIEFEL_FAMILIES]
        groups[f"{m} x {n}"] = [(np.float32(point), np.float32(grad)) for point, grad in pairs]
    for _, point, grad in record_gradients(steps=steps, seed=0):
        m, n = point.shape
        groups.setdefault(f"main job, {m} x {n}", []).append((np.float32(point), np.float32(grad)))
    return groups


def walk_row(preset: str, passes: str, shape: tuple[int, int], kind: str, steps: int) -> dict:
    """Return the distances of an emulated run of `drift`, overall and at the end."""
    geometry, copied = Stiefel(solver=PRESETS[preset]), kind == "master copies"
    tx = optim.manifold_muon(rate_of(steps), geometry, track_gap=False)
    tx = optim.with_master_copies(tx) if copied else tx
    tx = optax.GradientTransformation(tx.init, on_tpu(tx.update, PASSES[passes]))
    curve = walk(
        tx, geometry, shape, steps,
        dtype=jnp.float32 if kind == "float32" else jnp.bfloat16,
        watched=lambda weight, state: (weight, state.copies if copied else weight),
    )  # fmt: skip
    row = {"preset": preset, "passes": passes, "shape": list(shape), "parameters": kind}
    last, of_copies = last_tenth(curve)
    return row | {
        "steps": steps,
        "distance": float(curve[:, 0].max()),
        LAST: float(last),
        LAST_OF_COPIES: float(of_copies),
    }


def step_costs() -> list[dict]:
    """Return costs of direction, gap and retraction: in six passes throughout, and as delivered."""

    def step(solver, point, grad):
        manifold = Stiefel(solver=solver)
        found = manifold.steepest(point, grad, ())
        return manifold.retract(point, found.direction), found.gap

    rows = []
    pairs = {"ClosedForm()": "SkewPolar()", "ProjectedPolar()": "ProjectedPolar(HIGHEST)"}
    for preset, exact in pairs.items():
        slow, quick = (functools.partial(step, x) for x in (EXACT[exact], PRESETS[preset]))
        for shape in ((1024, 256), (1024, 768), (512, 512)):
            row = {"preset": preset, "shape": list(shape), "float32": cost(slow, shape, 6, 2)}
            rows.append(row | {"as delivered": cost(quick, shape, None, 2)})
    own, shape = POLAR["TRAINING_MSIGN"], (1024, 256)
    row = {"preset": "muon", "shape": list(shape), "float32": cost(own, shape, 6, 1)}
    return [*rows, row | {"as delivered": cost(own, shape, None, 1)}]


def markdown(record: dict) -> str:
    """Return the record as Markdown tables."""

    def cell(value):
        if isinstance(value, list):
            return " x ".join(map(str, value))
        if isinstance(value, float):
            return "fails" if value > 1e6 else f"{value:.2g}"
        return str(value)

    def table(rows, *columns):
        return markdown_table(columns, [[cell(row[c]) for c in columns] for row in rows])

    lines = [
        "# Products in few passes",
        "\n".join((__doc__ or "").split("\n")[4:8]),
        "## The polar factor",
        f"Error: the largest |sigma - 1| among singular values above {LARGE} of the largest.\n"
        "Norm: the largest singular value of the answer. Cost at 1024 x 256.",
        table(record["polar"], "method", "passes", "cost", "error", "norm"),
        "## Directions on the Stiefel manifold",
        "The largest gap and tangent residual of a group of gradients.",
        table(record["solvers"], "solver", "passes", "gradients", "cost", "gap", "residual"),
        "## Distance from the manifold",
        f"The largest `|sigma - 1|` after any of {record['walks'][0]['steps']} steps: momentum\n"
        "0.95, a fresh Gaussian gradient in each, a learning rate that falls from 0.1 to 0.001.",
        table(record["walks"], "preset", "passes", "shape", "parameters", "distance", LAST,
              LAST_OF_COPIES),
        "## Whole steps",
        "Direction, gap and retraction of one matrix: multiplications in passes, relative to "
        "those\nof the peer's direction. float32: six passes throughout.",
        table(record["steps"], "preset", "shape", "float32", "as delivered"),
    ]  # fmt: skip
    return "\n\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("precision", __doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of each walk")
    parser.add_argument("--recorded", type=int, default=200, help="steps of the recorded main job")
    options = parse(parser, argv, beside=(".md",))
    record: dict[str, Any] = {"steps": step_costs(), "solvers": []}
    record["polar"] = [polar_row(name, passes) for name in POLAR for passes in PASSES]
    problems = problems_of(options.recorded)
    for name in tqdm(SOLVERS, unit="solver"):
        for passes in ("1", "3", "6") if name in EXACT else ("as delivered",):
            record["solvers"] += [
                solver_row(name, passes, group, pairs) for group, pairs in problems.items()
            ]
    record["walks"] = [walk_row(*case, options.steps) for case in tqdm(WALKS, unit="walk")]
    save_with_table(options, record, markdown(record))


if __name__ == "__main__":
    main()
