"""Time, gap and residual of a direction on the Stiefel manifold, by solver and gradient.

    python -m benchmarks solvers    # a few minutes; docs/benchmarks/results/solvers.*

Times are relative to the five steps of Optax's Muon and to the published closed form (QR of [W G],
eight steps of Polar Express of a 2n x 2n matrix). Gaps and residuals are measured in float64 by
singular value decompositions. Gradients come from the four families of `manifoldmuon.testing` and
from recordings of the main job.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from benchmarks._baselines import ADMM, AlternatingProjection, FixedPoint
from benchmarks._gradients import record_gradients
from benchmarks._harness import command, save_with_table, timed
from manifoldmuon.linalg import DEFAULT_MSIGN, POLAR_EXPRESS, TRAINING_MSIGN, msign
from manifoldmuon.manifolds import solvers
from manifoldmuon.norms import Spectral
from studies.display import COLOURS, dress, legend_above, markdown_table, panels
from studies.program import parse
from tests.oracles.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem

SHAPES = ((3072, 128), (3072, 768), (1024, 768), (768, 768), (256, 256), (128, 64), (64, 10))
# Shapes for iterative solvers, which are slow, and for gaps, which need SVDs in float64.
SMALL = ((3072, 128), (128, 64), (64, 10))
MUON, QR = "optax.contrib.muon, five steps", "published closed form, QR"
SOLVERS: dict[str, solvers.StiefelSolver] = {
    "ClosedForm()": solvers.ClosedForm(),
    "ProjectedPolar()": solvers.ProjectedPolar(),
    "SkewPolar()": solvers.SkewPolar(),
    "Resolvents()": solvers.Resolvents(),
    "alternating projection, 10": AlternatingProjection(steps=10),
    "dual ascent, 30": solvers.DualAscent(steps=30),
    "dual ascent, 100": solvers.DualAscent(steps=100),
    "fixed point, 5": FixedPoint(steps=5),
    "fixed point, 20": FixedPoint(steps=20),
    "ADMM, 10": ADMM(steps=10),
    "ADMM, 30": ADMM(steps=30),
}
DIRECT = ("ClosedForm()", "ProjectedPolar()", "SkewPolar()", "Resolvents()", QR)
UNCONSTRAINED = {
    "unconstrained, converged msign": DEFAULT_MSIGN,
    "unconstrained, training msign": TRAINING_MSIGN,
}


def polar_express(x: jax.Array, steps: int) -> jax.Array:
    """Return the polar factor by Polar Express as published."""
    x, identity = x / (jnp.linalg.norm(x) + 1e-7), jnp.eye(x.shape[1], dtype=x.dtype)
    for a, b, c in POLAR_EXPRESS.with_steps(steps).coefficients:
        gram = x.T @ x
        x = x @ (a * identity + b * gram + c * gram @ gram)
    return x


@jax.jit
def dual_ascent(point: jax.Array, grad: jax.Array) -> jax.Array:
    """Return the direction of "Modular manifolds": 100 iterations, a ten-step msign in each."""

    def ascend(k, dual):
        direction = polar_express(grad + 2 * point @ dual, 10)
        residual = point.T @ direction + direction.T @ point
        return dual - 0.01 * (1 - k / 100) * residual

    start = -(point.T @ grad + grad.T @ point) / 4
    dual = jax.lax.fori_loop(0, 99, ascend, start)
    return polar_express(grad + 2 * point @ dual, 10)


@jax.jit
def closed_form_by_qr(point: jax.Array, grad: jax.Array) -> jax.Array:
    """Return the closed form in the basis of `qr([W G])` (arXiv:2608.06218)."""
    basis, factor = jnp.linalg.qr(jnp.concatenate([point, grad], axis=1))
    n = point.shape[1]
    here, there = factor[:, :n], factor[:, n:]  # W and G in the basis
    product = there @ here.T
    return basis @ (polar_express(product - product.T, 8) @ here)


PUBLISHED = {"published dual ascent": dual_ascent, QR: closed_form_by_qr}


@functools.partial(jax.jit, static_argnums=0)
def solve(solver: solvers.StiefelSolver, point, grad):
    """Solve from a cold start with the solver's own budget."""
    return solver.solve(Spectral(), point, grad, solver.init(point.shape))


@jax.jit
def muon_direction(grad):
    """Return the direction of Optax's Muon, without momentum."""
    tx = optax.contrib.scale_by_muon(beta=0.0)
    return tx.update(grad, tx.init(grad))[0]


def accuracy(
    label: str, point: jax.Array, grad: jax.Array, names: Sequence[str] = (*PUBLISHED, *SOLVERS)
) -> list[dict]:
    """Return a row per solver: true gap, reported gap, residual before and after, norm."""
    rows = []
    for name in names:
        reported: dict[str, float] = {}
        if name in PUBLISHED:
            direction = PUBLISHED[name](point, grad)
        else:
            answer = solve(SOLVERS[name], point, grad)
            direction, gap, residual = answer.direction, answer.gap, answer.residual
            reported = {"reported gap": float(gap), "raw residual": float(residual)}
        errors = stiefel_errors(point, grad, direction)
        row = {"solver": name, "gradient": label, "shape": list(point.shape), "gap": errors.gap}
        rows.append(row | reported | {"residual": errors.residual, "norm": errors.norm})
    return rows


def problems(steps: int) -> list[tuple[str, jax.Array, jax.Array]]:
    """Return points and gradients: the families by shape, and momenta from the main job."""
    families = [
        (family, *stiefel_problem(family, *shape, 0))
        for shape in (*SMALL, (256, 64), (80, 64))
        for family in STIEFEL_FAMILIES
    ]
    recorded = record_gradients(steps=steps, seed=0)
    found = families + [(f"main job, {label}", point, grad) for label, point, grad in recorded]
    return [(label, jnp.float32(point), jnp.float32(grad)) for label, point, grad in found]


def timings(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Time directions on a Gaussian gradient."""
    rng = np.random.default_rng(0)
    point = jnp.float32(np.linalg.qr(rng.standard_normal(shape))[0])
    grad = jnp.float32(rng.standard_normal(shape))
    constrained: dict[str, Callable] = dict(PUBLISHED)
    constrained |= {name: functools.partial(solve, solver) for name, solver in SOLVERS.items()}
    functions: dict[str, Callable] = {MUON: functools.partial(muon_direction, grad)}
    for name, function in constrained.items():
        if shape in SMALL or name in DIRECT:
            functions[name] = functools.partial(function, point, grad)
    for name, method in UNCONSTRAINED.items():
        functions[name] = functools.partial(msign, grad, method)
    return {"shape": list(shape)} | timed(functions, rounds)


def markdown(record: dict) -> str:
    """Return the record as Markdown tables."""
    parts = ["# Stiefel solvers", "Times are medians in one run. Gaps are true gaps."]
    for row in record["timings"]:
        seconds, here = (
            row["seconds"],
            [r for r in record["accuracy"] if r["shape"] == row["shape"]],
        )
        labels = list(dict.fromkeys(r["gradient"] for r in here))
        gaps = {(r["solver"], r["gradient"]): f"{r['gap']:.1e}" for r in here}
        lines = [
            [name, f"{value * 1e6:.0f}", f"{value / seconds[MUON]:.2f}",
             f"{value / seconds[QR]:.2f}", *(gaps.get((name, label), "") for label in labels)]
            for name, value in seconds.items()
        ]  # fmt: skip
        header = ["solver", "microseconds", "time of Muon's five steps", "of the closed form by QR"]
        header += [f"gap, {label}" for label in labels]
        parts += [f"## {row['shape'][0]} x {row['shape'][1]}", markdown_table(header, lines)]
    lines = [
        [r["solver"], f"{r['gradient']} {r['shape'][0]}x{r['shape'][1]}", f"{r['gap']:.1e}",
         f"{r['reported gap']:.1e}" if "reported gap" in r else "", f"{r['residual']:.1e}"]
        for r in record["accuracy"] if r["gradient"].startswith("main job")
    ]  # fmt: skip
    header = ["solver", "gradient", "gap", "reported", "residual"]
    return "\n\n".join((*parts, "## Gradients of the main job", markdown_table(header, lines)))


def plot(record: dict) -> Figure:
    """Plot gap against time, with a panel per shape: smallest and largest gap of the families."""
    figure, grid = panels(1, len(SMALL), width=3.6, height=3.8)
    times = {tuple(row["shape"]): row["seconds"] for row in record["timings"]}
    for panel, shape in zip(grid[0], SMALL, strict=True):
        seconds = times[shape]
        gaps: dict[str, list[float]] = {}
        for row in record["accuracy"]:
            if tuple(row["shape"]) == shape and row["gradient"] in STIEFEL_FAMILIES:
                gaps.setdefault(row["solver"], []).append(max(row["gap"], 1e-8))
        for index, (name, found) in enumerate(gaps.items()):
            style = {"color": COLOURS[index % 7], "marker": "od"[index // 7]}
            across = seconds[name] / seconds[MUON]
            panel.plot([across] * 2, [min(found), max(found)], label=name, **style)
        panel.set(xscale="log", yscale="log", xlim=(0.1, 300), ylim=(3e-8, 1))
        title = f"{shape[0]} x {shape[1]}"
        dress(panel, title, "families of gradients: best to worst", "time, Muon's five = 1", "gap")
    legend_above(figure, grid[0, 0], columns=5)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("solvers", __doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=200, help="steps of the recorded main job")
    options = parse(parser, argv, beside=(".md", ".png"))
    record: dict[str, Any] = {"accuracy": [], "timings": []}
    for problem in problems(options.steps):
        print(f"accuracy: {problem[0]}, {problem[1].shape}", flush=True)
        record["accuracy"] += accuracy(*problem)
    for shape in SHAPES:
        print(f"timing: {shape[0]}x{shape[1]}", flush=True)
        record["timings"].append(timings(shape, options.rounds))
    save_with_table(options, record, markdown(record))
    plot(record).savefig(options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
