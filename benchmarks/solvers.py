"""Accuracy and cost of Stiefel solvers: solver x gradient x budget.

    python -m benchmarks.solvers    # a few minutes; docs/benchmarks/results/solvers.*

Times are relative, within one run, to Muon's five steps in `optax.contrib` and to the published
closed form (QR of [W G], eight steps of Polar Express of a 2n x 2n matrix); gaps and residuals are
measured in float64 by singular value decompositions. Gradients come from the four families of
`studies.stiefel_problems` and from recordings of the main job.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from benchmarks._command import command
from benchmarks._published import closed_form_by_qr, closed_form_by_rows, dual_ascent
from manifoldmuon.linalg import DEFAULT_MSIGN, TRAINING_MSIGN, msign
from manifoldmuon.manifolds.solvers import (
    ClosedForm,
    DualAscent,
    ProjectedPolar,
    Resolvents,
    SkewPolar,
    StiefelSolver,
)
from manifoldmuon.norms import Spectral
from studies.baselines import ADMM, AlternatingProjection, FixedPoint
from studies.digits.gradients import record_gradients
from studies.display import COLOURS, dress, panels
from studies.program import parse, save
from studies.stiefel_problems import STIEFEL_FAMILIES, stiefel_errors, stiefel_problem
from studies.timing import interleaved_seconds

SHAPES = ((3072, 128), (3072, 768), (1024, 768), (768, 768), (256, 256), (128, 64), (64, 10))
# Shapes for iterative solvers, which are slow, and for gaps, which need SVDs in float64.
SMALL = ((3072, 128), (128, 64), (64, 10))
PUBLISHED = {
    "published dual ascent": dual_ascent,
    "published closed form, QR": closed_form_by_qr,
    "m x m, five steps of Muon": closed_form_by_rows,
}
SOLVERS: dict[str, StiefelSolver] = {
    "accurate": ClosedForm(),
    "fast": ProjectedPolar(),
    "products": SkewPolar(),
    "resolvents": Resolvents(),
    "alternating projection, 10": AlternatingProjection(steps=10),
    "dual ascent, 30": DualAscent(steps=30),
    "dual ascent, 100": DualAscent(steps=100),
    "fixed point, 5": FixedPoint(steps=5),
    "fixed point, 20": FixedPoint(steps=20),
    "ADMM, 10": ADMM(steps=10),
    "ADMM, 30": ADMM(steps=30),
}
# Unconstrained directions.
UNCONSTRAINED = {
    "unconstrained, converged msign": DEFAULT_MSIGN,
    "unconstrained, training msign": TRAINING_MSIGN,
}
MUON = "optax.contrib.muon, five steps"
DIRECT = ("accurate", "fast", "products", "resolvents")


@functools.partial(jax.jit, static_argnums=0)
def solve(solver: StiefelSolver, point, grad):
    """Solve from a cold start with the solver's own budget."""
    return solver.solve(Spectral(), point, grad, solver.init(point.shape))


def accuracy(name: str, solver: StiefelSolver, problems: dict) -> list[dict]:
    """Return a row per problem: true gap, reported gap, residual before and after, norm."""
    rows = []
    for label, (point, grad) in problems.items():
        answer = solve(solver, point, grad)
        errors = stiefel_errors(point, grad, answer.direction)
        rows.append(
            {
                "solver": name,
                "gradient": label,
                "shape": list(point.shape),
                "gap": errors.gap,
                "reported gap": float(answer.gap),
                "raw residual": float(answer.residual),
                "residual": errors.residual,
                "norm": errors.norm,
            }
        )
    return rows


def published_accuracy(name: str, problems: dict) -> list[dict]:
    """Return a row per problem for a published method."""
    rows = []
    for label, (point, grad) in problems.items():
        errors = stiefel_errors(point, grad, PUBLISHED[name](point, grad))
        row = {"solver": name, "gradient": label, "shape": list(point.shape)}
        rows.append(row | {"gap": errors.gap, "residual": errors.residual, "norm": errors.norm})
    return rows


def family_problems(shape: tuple[int, int], seed: int) -> dict:
    """Return the four families at a shape, in float32."""
    return {
        family: tuple(jnp.float32(x) for x in stiefel_problem(family, *shape, seed))
        for family in STIEFEL_FAMILIES
    }


def recorded_problems(steps: int) -> dict:
    """Return tall weights and momenta from the Stiefel layers of the main job."""
    return {
        f"main job, {label}": (jnp.float32(point), jnp.float32(grad))
        for label, point, grad in record_gradients(steps=steps, seed=0)
    }


def timings(shape: tuple[int, int], rounds: int) -> dict[str, float]:
    """Return median seconds per direction on a Gaussian gradient."""
    rng = np.random.default_rng(0)
    point = jnp.float32(np.linalg.qr(rng.standard_normal(shape))[0])
    grad = jnp.float32(rng.standard_normal(shape))
    functions: dict = {MUON: functools.partial(muon_direction, grad)}
    for name, function in PUBLISHED.items():
        if shape in SMALL or name == "published closed form, QR":
            functions[name] = functools.partial(function, point, grad)
    for name, solver in SOLVERS.items():
        if shape in SMALL or name in DIRECT:
            functions[name] = functools.partial(solve, solver, point, grad)
    for name, method in UNCONSTRAINED.items():
        functions[name] = functools.partial(msign, grad, method)
    return interleaved_seconds(functions, rounds)


@jax.jit
def muon_direction(grad):
    """Return the direction of Optax's Muon, without momentum."""
    tx = optax.contrib.scale_by_muon(beta=0.0)
    return tx.update(grad, tx.init(grad))[0]


def growth(rounds: int) -> list[dict]:
    """Time the presets as m grows at n = 64, and as n grows at m = 4n."""
    rows = []
    shapes = [(m, 64) for m in (64, 128, 256, 1024, 4096)]
    shapes += [(4 * n, n) for n in (16, 32, 64, 128, 256)]
    for m, n in shapes:
        rng = np.random.default_rng(0)
        point = jnp.float32(np.linalg.qr(rng.standard_normal((m, n)))[0])
        grad = jnp.float32(rng.standard_normal((m, n)))
        functions = {
            name: functools.partial(solve, SOLVERS[name], point, grad)
            for name in ("accurate", "fast")
        }
        functions["unconstrained"] = functools.partial(msign, grad, TRAINING_MSIGN)
        rows.append({"shape": [m, n]} | interleaved_seconds(functions, rounds))
    return rows


def markdown(record: dict) -> str:
    """Return the record as Markdown tables."""
    lines = ["# Stiefel solvers", "", "Times are medians in one run. Gaps are true gaps.", ""]
    for shape in record["timings"]:
        seconds, rows = shape["seconds"], record["accuracy"]
        muon, published = seconds[MUON], seconds["published closed form, QR"]
        here = [row for row in rows if row["shape"] == shape["shape"]]
        labels = list(dict.fromkeys(row["gradient"] for row in here))
        lines += [
            f"## {shape['shape'][0]} x {shape['shape'][1]}",
            "",
            "| solver | microseconds | time of Muon's five steps | of the closed form by QR |"
            + "".join(f" gap, {label} |" for label in labels),
            "|---|---|---|---|" + "---|" * len(labels),
        ]
        for name, value in seconds.items():
            gaps = {row["gradient"]: row["gap"] for row in here if row["solver"] == name}
            cells = [f" {gaps[label]:.1e} |" if label in gaps else " |" for label in labels]
            lines.append(
                f"| {name} | {value * 1e6:.0f} | {value / muon:.2f} | {value / published:.2f} |"
                + "".join(cells)
            )
        lines.append("")
    lines += [
        "## Gradients of the main job",
        "",
        "| solver | gradient | gap | reported | residual |",
    ]
    lines.append("|---|---|---|---|---|")
    for row in record["accuracy"]:
        if row["gradient"].startswith("main job"):
            reported = f"{row['reported gap']:.1e}" if "reported gap" in row else ""
            lines.append(
                f"| {row['solver']} | {row['gradient']} {row['shape'][0]}x{row['shape'][1]} "
                f"| {row['gap']:.1e} | {reported} | {row['residual']:.1e} |"
            )
    lines += ["", "## Growth", "", "| shape | accurate, us | fast, us | unconstrained, us |"]
    lines.append("|---|---|---|---|")
    for row in record["growth"]:
        cells = " | ".join(f"{row[k] * 1e6:.0f}" for k in ("accurate", "fast", "unconstrained"))
        lines.append(f"| {row['shape'][0]} x {row['shape'][1]} | {cells} |")
    return "\n".join(lines) + "\n"


def plot(record: dict) -> Figure:
    """Plot gap against time, with a panel per shape: smallest and largest gap of the families."""
    figure, grid = panels(1, len(SMALL), width=6.0, height=4.6)
    timed = {tuple(shape["shape"]): shape["seconds"] for shape in record["timings"]}
    for panel, shape in zip(grid[0], SMALL, strict=True):
        seconds = timed[shape]
        gaps: dict[str, list[float]] = {}
        for row in record["accuracy"]:
            if tuple(row["shape"]) == shape and row["gradient"] in STIEFEL_FAMILIES:
                gaps.setdefault(row["solver"], []).append(max(row["gap"], 1e-8))
        for index, (name, found) in enumerate(gaps.items()):
            style = {"color": COLOURS[index % 8], "marker": "ods^"[index // 8]}
            across = seconds[name] / seconds[MUON]
            panel.plot([across] * 2, [min(found), max(found)], label=name, **style)
        panel.set(xscale="log", yscale="log", xlim=(0.1, 300), ylim=(3e-8, 1))
        title = f"{shape[0]} x {shape[1]}"
        dress(panel, title, "families of gradients: best to worst", "time, Muon's five = 1", "gap")
    grid[0, -1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = command("solvers", "Solver x gradient x budget: gap, residual, time.")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--steps", type=int, default=200, help="steps of the recorded main job")
    options = parse(parser, argv, beside=(".md", ".png"))
    record: dict = {"accuracy": [], "timings": []}
    groups = [family_problems(shape, 0) for shape in SMALL]
    groups += [family_problems(shape, 0) for shape in ((256, 64), (80, 64))]
    groups.append(recorded_problems(options.steps))
    for problems in groups:
        for name in PUBLISHED:
            record["accuracy"] += published_accuracy(name, problems)
        for name, solver in SOLVERS.items():
            print(f"accuracy: {name}, {next(iter(problems))}", flush=True)
            record["accuracy"] += accuracy(name, solver, problems)
    for shape in SHAPES:
        print(f"timing: {shape[0]}x{shape[1]}", flush=True)
        record["timings"].append({"shape": list(shape), "seconds": timings(shape, options.rounds)})
    record["growth"] = growth(options.rounds)
    save(options, record)
    table = markdown(record)
    options.out.with_suffix(".md").write_text(table, encoding="utf-8")
    plot(record).savefig(options.out.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
