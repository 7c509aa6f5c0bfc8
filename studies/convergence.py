"""Convergence by retraction, vector transport and trust-region model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from manifoldmuon.manifolds import Manifold, Orthogonal, Stiefel
from manifoldmuon.manifolds.retractions import QR, Cayley, Polar, Retraction
from manifoldmuon.minimize import LBFGS, TrustRegion, minimize
from studies.display import COLOURS, dress, panels, text_table
from studies.study import Cell, Record, Row, Study, option

RETRACTIONS = {"polar": Polar(), "QR": QR(), "Cayley": Cayley()}


@dataclasses.dataclass(frozen=True)
class Differential(LBFGS):
    """L-BFGS with its memory transported by the derivative of the retraction, as in theory."""

    def move(self, problem, point, step, new, euclidean, rows):
        _, push = jax.linearize(lambda vector: problem.retract(point, vector), step)
        return problem.project(new, euclidean), jax.vmap(push)(jnp.concatenate(rows))


@dataclasses.dataclass(frozen=True)
class Pullback(TrustRegion):
    """A trust region with a second-order exact model of the cost along the retraction.

    Attributes:
      retraction: the manifold's retraction.
      shape: the shape of the points.
    """

    retraction: Retraction = Polar()
    shape: tuple[int, int] = (1, 1)

    def model(self, problem, point):
        def along(vector: Array) -> Array:
            step = problem.project(point, vector).reshape(self.shape)
            return problem.cost(self.retraction.retract(point.reshape(self.shape), step).ravel())

        # Not `problem.retract`: near a zero step it returns the point itself, bit for bit.
        zero = jnp.zeros_like(point)
        gradient, hessian = jax.linearize(jax.grad(along), zero)
        return gradient, hessian, problem.cost(point)


METHODS = ("trust region", "trust region, pullback", "L-BFGS", "L-BFGS, differential")


@dataclasses.dataclass(frozen=True)
class Task:
    """A cost, with the manifold and shape of its points."""

    manifold: type[Stiefel]
    shape: tuple[int, int]

    def data(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        m, n = self.shape
        if m != n:
            return rng.standard_normal((2, m + 3, m))
        sources = rng.laplace(size=(1000, n))
        return np.linalg.svd(sources - sources.mean(0), full_matrices=False)[0] * np.sqrt(1000)

    def cost(self, x: Array, a: Array) -> Array:
        m, n = self.shape
        if m != n:  # Procrustes
            return jnp.sum((a[0] @ x - a[1][:, :n]) ** 2) / m
        return jnp.sum(jnp.mean(jnp.log(jnp.cosh(a @ x)), axis=0))  # independent components


TASKS = {"Procrustes": Task(Stiefel, (30, 3)), "independent components": Task(Orthogonal, (8, 8))}


@dataclasses.dataclass(frozen=True)
class Convergence(Study):
    """How does the choice of a retraction show in convergence?

    Minimises two costs in float64, to a Riemannian gradient of 1e-10: Procrustes on the Stiefel
    manifold (30 x 3) and independent components on the orthogonal group (8 x 8). Trust regions use
    the Riemannian Hessian or the Hessian of the cost along the retraction; L-BFGS transports its
    memory by projection or by the derivative of the retraction. The gradient is recorded at every
    step.
    """

    name: ClassVar[str] = "convergence"
    traced: ClassVar[tuple[str, ...]] = ("seed",)

    tasks: tuple[str, ...] = option(tuple(TASKS), "what is minimised", choices=tuple(TASKS))
    retractions: tuple[str, ...] = option(tuple(RETRACTIONS), "which", choices=tuple(RETRACTIONS))
    methods: tuple[str, ...] = option(METHODS, "of minimisation", choices=METHODS)
    seeds: tuple[int, ...] = option((0, 1, 2), "of the data and the start")

    def __post_init__(self):
        if not all((self.tasks, self.retractions, self.methods, self.seeds)):
            raise ValueError("name at least one task, retraction, method and seed")

    def cells(self) -> Sequence[Cell]:
        return [
            {"task": task, "method": method, "retraction": retraction, "seed": seed}
            for task in self.tasks
            for method in self.methods
            for retraction in self.retractions
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        task, retraction = TASKS[cell["task"]], RETRACTIONS[cell["retraction"]]
        method = {
            "trust region": TrustRegion(),
            "trust region, pullback": Pullback(retraction=retraction, shape=task.shape),
            "L-BFGS": LBFGS(),
            "L-BFGS, differential": Differential(),
        }[cell["method"]]
        manifold: Manifold = task.manifold(retraction=retraction)
        with jax.enable_x64(True):
            start = manifold.random_point(jax.random.key(cell["seed"]), task.shape, jnp.float64)
            found = minimize(
                task.cost, manifold, start, (task.data(cell["seed"]),),
                method=method, tolerance=1e-10, max_steps=500, callback=_note,
            )  # fmt: skip
            jax.block_until_ready(found)
            jax.effects_barrier()
        curve = [norm for _, norm in sorted(_NOTED)]
        _NOTED.clear()
        return {
            "gradients": curve,
            "steps": int(found.steps),
            "evaluations": int(found.evaluations),
            "reason": int(found.reason),
            "value": float(found.value),
        }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for row in rows:
            method = found.setdefault(row["task"], {}).setdefault(row["method"], {})
            entry = method.setdefault(row["retraction"], {"evaluations": [], "steps": []})
            for name in ("evaluations", "steps"):
                entry[name].append(row[name] if row["reason"] == 0 else None)
        return {
            task: {
                method: {name: _medians(entry) for name, entry in entries.items()}
                for method, entries in methods.items()
            }
            for task, methods in found.items()
        }

    def table(self, record: Record) -> str:
        lines = []
        for task, methods in record["summary"].items():
            for method, entries in methods.items():
                cells = []
                for name in record["settings"]["retractions"]:
                    entry = entries[name]
                    failed = f" ({entry['failed']} failed)" if entry["failed"] else ""
                    cells.append(f"{entry['steps']}, {entry['evaluations']}{failed}")
                lines.append([f"{task}, {method}", *cells])
        header = ["steps, evaluations", *record["settings"]["retractions"]]
        return f"{text_table(header, lines)}\nmedians over the seeds that reached 1e-10"

    def plot(self, record: Record) -> Any:
        tasks = record["settings"]["tasks"]
        figure, grid = panels(len(tasks), 2, width=5.0, height=3.4)
        colours = dict(zip(RETRACTIONS, COLOURS, strict=False))
        for task, line in zip(tasks, grid, strict=True):
            for panel, method in zip(line, ("trust region", "L-BFGS"), strict=True):
                for row in record["rows"]:
                    plain, base = row["method"] == method, row["method"].split(",")[0] == method
                    if (row["task"], row["seed"]) != (task, record["settings"]["seeds"][0]):
                        continue
                    if base:
                        panel.semilogy(
                            row["gradients"], color=colours[row["retraction"]], linewidth=1.4,
                            linestyle="-" if plain else (0, (3, 2)),
                            label=row["retraction"] if plain else None,
                        )  # fmt: skip
                panel.axhline(1e-10, color="#767676", linewidth=0.8)
                panel.legend(frameon=False, fontsize=8)
                more = "Hessian along the retraction" if method != "L-BFGS" else "differential"
                dress(panel, f"{task}: {method}", f"dashed: {more}", "step", "Riemannian gradient")
        return figure


_NOTED: list[tuple[int, float]] = []


def _note(steps: Any, value: Any, norm: Any) -> None:
    """Record the gradient's norm. A global function, so that compiled programs are shared."""
    del value
    _NOTED.append((int(steps), float(norm)))


def _medians(entry: Mapping[str, Sequence[int | None]]) -> dict[str, Any]:
    good = {name: [x for x in found if x is not None] for name, found in entry.items()}
    medians = {name: float(np.median(x)) if x else None for name, x in good.items()}
    return medians | {"failed": len(entry["steps"]) - len(good["steps"])}
