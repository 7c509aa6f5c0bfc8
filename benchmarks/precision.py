"""Cost and error of matrix products in few passes: method x passes, emulated on a CPU.

    python -m benchmarks.precision    # ten minutes; docs/benchmarks/results/precision.*

A TPU computes a float32 product in one, three or six passes of bfloat16. Methods run with one,
three or six passes in every product, and as delivered, where each product sets its own number;
`benchmarks._passes` rounds the factors as a TPU does. Costs are multiplications in passes, relative
to the five steps of `optax.contrib.muon`, which take one pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks._command import command, save_with_table
from benchmarks._passes import multiplications, on_tpu
from benchmarks.drift import PRESETS, RATES, distances
from benchmarks.msign_accuracy import matrix
from manifoldmuon import optim
from manifoldmuon.linalg import DEFAULT_MSIGN, TRAINING_MSIGN, msign
from manifoldmuon.manifolds import Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar, SkewPolar, StiefelSolver
from studies.digits.gradients import record_gradients
from studies.display import markdown_table
from studies.polar_methods import GramEigh, InverseRoot
from studies.program import parse
from studies.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

PASSES = {"as delivered": None, "1": 1, "3": 3, "6": 6}
SHAPES = ((256, 64), (80, 64), (64, 64))
LARGE = 0.05  # relative to the largest: each method here brings these to 1 in float32
STEPS, CHUNK = 10_000, 500
LAST, LAST_OF_COPIES = "in the last tenth", "of the copies, in the last tenth"


def peer(grad):
    """Return Optax's Muon direction for a gradient: five steps."""
    tx = optax.contrib.scale_by_muon(beta=0.0)
    return tx.update(grad, tx.init(grad))[0]


POLAR = {
    "optax.contrib.muon": peer,
    "TRAINING_MSIGN": functools.partial(msign, method=TRAINING_MSIGN),
    "DEFAULT_MSIGN": functools.partial(msign, method=DEFAULT_MSIGN),
    "GramEigh()": functools.partial(msign, method=GramEigh()),
    "InverseRoot()": functools.partial(msign, method=InverseRoot()),
}
SOLVERS: dict[str, StiefelSolver] = {
    "FAST": ProjectedPolar(),
    "ACCURATE": ClosedForm(),
    "ProjectedPolar()": ProjectedPolar(precision=jax.lax.Precision.HIGHEST),
    "SkewPolar()": SkewPolar(),
}


def cost(function, shape: tuple[int, int], passes: int | None, arguments: int) -> float:
    """Return multiplications in passes, relative to Optax's five steps."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    own = multiplications(function, *[like] * arguments, passes=passes)
    return own / multiplications(peer, like, passes=1)


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
    return {
        "method": name,
        "passes": passes,
        "cost": cost(POLAR[name], (1024, 256), PASSES[passes], 1),
        "error": float(np.max(miss)),
        "norm": float(np.max(largest)),
    }


def solver_rows(name: str, passes: str, problems: dict) -> list[dict]:
    """Return a row per group of problems: the largest gap and residual, and the report's slack."""
    manifold = Stiefel(solver=SOLVERS[name])

    def direction(point, grad):
        answer = manifold.steepest(point, grad, ())
        return answer.direction, answer.gap

    solve, rows = jax.jit(on_tpu(direction, PASSES[passes])), []
    for group, pairs in problems.items():
        gaps, residuals, slack = [], [], []
        for point, grad in pairs:
            found, reported = solve(jnp.float32(point), jnp.float32(grad))
            errors = stiefel_errors(point, grad, np.nan_to_num(found, nan=1e30))
            gaps.append(errors.gap)
            residuals.append(errors.residual)
            slack.append(float(reported) - errors.gap)
        shape = pairs[0][0].shape
        rows.append(
            {
                "solver": name,
                "passes": passes,
                "gradients": group,
                "cost": cost(lambda p, g: direction(p, g)[0], shape, PASSES[passes], 2),
                "gap": float(np.max(gaps)),
                "residual": float(np.max(residuals)),
                "least reported minus true gap": float(np.min(slack)),
            }
        )
    return rows


def problems_of(steps: int) -> dict:
    """Return tall float32 points and gradients: the families by shape, and from the main job."""
    groups = {
        f"{m} x {n}": [
            tuple(np.float32(x) for x in stiefel_problem(family, m, n))
            for family in STIEFEL_FAMILIES
        ]
        for m, n in SHAPES
    }
    for _, point, grad in record_gradients(steps=steps, seed=0):
        m, n = point.shape
        groups.setdefault(f"main job, {m} x {n}", []).append((np.float32(point), np.float32(grad)))
    return groups


def walk(
    preset: str, passes: str, shape: tuple[int, int], kind: str, steps: int, bar: tqdm
) -> dict:
    """Run a case of `benchmarks.drift`, emulated; return distances overall and at the end.

    Args:
      kind: "float32" or "bfloat16" parameters, or bfloat16 parameters with "master copies".
    """
    geometry = Stiefel(solver=PRESETS[preset])
    rate = optax.exponential_decay(RATES[0], steps, RATES[1] / RATES[0])
    tx = optim.manifold_muon(rate, geometry, track_gap=False)
    tx = optim.with_master_copies(tx) if kind == "master copies" else tx
    dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    weight = optim.init_tree(geometry, jax.random.key(0), like).astype(dtype)
    update = on_tpu(tx.update, PASSES[passes])

    @jax.jit
    def chunk(carry, keys):
        def step(carry, key):
            weight, state = carry
            updates, state = update(jax.random.normal(key, shape), state, weight)
            weight: Any = optax.apply_updates(weight, updates)
            copy = state.copies if kind == "master copies" else weight
            return (weight, state), (weight.astype(jnp.float32), copy.astype(jnp.float32))

        return jax.lax.scan(step, carry, keys)

    carry, curve = (weight, tx.init(weight)), []
    keys = jax.random.split(jax.random.key(1), steps)
    for first in range(0, steps, CHUNK):
        carry, passed = chunk(carry, keys[first : first + CHUNK])
        curve.append([float(distances(geometry, np.asarray(x, np.float64)).max()) for x in passed])
        bar.update(len(passed[0]))
    last = np.max(curve[-max(1, len(curve) // 10) :], axis=0)
    row = {"preset": preset, "passes": passes, "shape": list(shape), "parameters": kind}
    return row | {
        "steps": steps,
        "distance": float(np.max(curve, axis=0)[0]),
        LAST: float(last[0]),
        LAST_OF_COPIES: float(last[1]),
    }


RETRACTED = ("as delivered", "1", "3", "6")
WALKS = [
    *[("fast", passes, (128, 64), "float32") for passes in RETRACTED],
    *[("accurate", "as delivered", shape, "float32") for shape in ((64, 10), (128, 64))],
    *[
        ("fast", "as delivered", (64, 64), kind)
        for kind in ("float32", "bfloat16", "master copies")
    ],
]


def markdown(record: dict) -> str:
    """Return the record as Markdown tables."""
    lines = ["# Products in few passes", "", *(__doc__ or "").split("\n")[4:8], ""]
    lines += [
        "## The polar factor",
        "",
        f"Error: the largest |sigma - 1| among singular values above {LARGE} of the largest.",
        "Norm: the largest singular value of the answer. Cost at 1024 x 256.",
        "",
        table(record["polar"], ("method", "passes", "cost", "error", "norm")),
        "",
        "## Directions on the Stiefel manifold",
        "",
        "The largest gap and tangent residual of a group of gradients.",
        "",
        table(record["solvers"], ("solver", "passes", "gradients", "cost", "gap", "residual")),
        "",
        "## Distance from the manifold",
        "",
        f"The largest `|sigma - 1|` after any of {record['walks'][0]['steps']} steps: momentum",
        "0.95, a fresh Gaussian gradient in each, a learning rate that falls from 0.1 to 0.001.",
        "",
        table(
            record["walks"],
            ("preset", "passes", "shape", "parameters", "distance", LAST, LAST_OF_COPIES),
        ),
        "",
        "## Whole steps",
        "",
        "Direction, gap and retraction of one matrix: multiplications in passes, relative to those",
        "of the peer's direction. float32: six passes throughout.",
        "",
        table(record["steps"], ("preset", "shape", "float32", "as delivered")),
    ]
    return "\n".join(lines)


def table(rows: list[dict], columns: tuple[str, ...]) -> str:
    """Return the columns of the rows as Markdown."""

    def cell(value):
        if isinstance(value, list):
            return " x ".join(map(str, value))
        if isinstance(value, float):
            return "fails" if value > 1e6 else f"{value:.2g}"
        return str(value)

    return markdown_table(columns, [[cell(row[c]) for c in columns] for row in rows])


def step_costs() -> list[dict]:
    """Return the cost of direction and retraction, as delivered and in six passes throughout."""
    rows = []
    exact = {"fast": SOLVERS["ProjectedPolar()"], "accurate": SOLVERS["SkewPolar()"]}
    for preset, solver in PRESETS.items():
        for shape in ((1024, 256), (1024, 768), (512, 512)):
            row: dict = {"preset": preset, "shape": list(shape)}
            for name, used, passes in (
                ("float32", exact[preset], 6),
                ("as delivered", solver, None),
            ):
                manifold = Stiefel(solver=used)

                def step(point, grad, manifold=manifold):
                    found = manifold.steepest(point, grad, ())
                    return manifold.retract(point, found.direction), found.gap

                row[name] = cost(step, shape, passes, 2)
            rows.append(row)
    rows.append({"preset": "muon", "shape": [1024, 256]})
    for name, passes in (("float32", 6), ("as delivered", None)):
        rows[-1][name] = cost(POLAR["TRAINING_MSIGN"], (1024, 256), passes, 1)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("precision", (__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each walk")
    parser.add_argument("--recorded", type=int, default=200, help="steps of the recorded main job")
    options = parse(parser, argv, beside=(".md",))
    record: dict = {"steps": step_costs(), "solvers": []}
    record["polar"] = [polar_row(name, passes) for name in POLAR for passes in PASSES]
    problems = problems_of(options.recorded)
    for name in SOLVERS:
        for passes in ("as delivered",) if name in ("FAST", "ACCURATE") else ("1", "3", "6"):
            print(f"{name}, passes: {passes}", flush=True)
            record["solvers"] += solver_rows(name, passes, problems)
    with tqdm(total=len(WALKS) * options.steps, unit="step", dynamic_ncols=True) as bar:
        record["walks"] = [walk(*case, options.steps, bar) for case in WALKS]
    save_with_table(options, record, markdown(record))


if __name__ == "__main__":
    main()
