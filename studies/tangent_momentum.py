"""Momentum on a fixed cost: full gradients, projected gradients, re-projected momentum."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from manifoldmuon.manifolds import Manifold, Stiefel
from manifoldmuon.minimize import TrustRegion, minimize
from manifoldmuon.optim import manifold_muon, project_tangent
from studies import convergence
from studies.display import COLOURS, dress, panels, short, text_table
from studies.study import Cell, Record, Row, Study, option


@dataclasses.dataclass(frozen=True)
class OrderedPCA(convergence.Task):
    """Find dominant eigenvectors in order; the eigenvalues are 1, 1/2, 1/3, and so on."""

    def data(self, seed: int) -> np.ndarray:
        m = self.shape[0]
        basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((m, m)))[0]
        return (basis / np.arange(1, m + 1)) @ basis.T

    def cost(self, x: Array, a: Array) -> Array:
        return -jnp.sum(x * (a @ x) * jnp.arange(1.0, self.shape[1] + 1))


TASKS = {"ordered PCA": OrderedPCA(Stiefel, (40, 3)), **convergence.TASKS}

WHOLE = "gradients whole"
PROJECTED = "gradients projected"
CARRIED = "momentum projected, too"
VARIANTS = (WHOLE, PROJECTED, CARRIED)


def carried_momentum(manifold: Manifold, momentum: float) -> optax.GradientTransformation:
    """Return Nesterov momentum of projected gradients, projected again at each new point."""
    project = project_tangent(manifold)

    def update(updates, state, params=None):
        gradient, _ = project.update(updates, optax.EmptyState(), params)
        trace, _ = project.update(state, optax.EmptyState(), params)
        trace = optax.tree.add_scale(gradient, momentum, trace)
        return optax.tree.add_scale(gradient, momentum, trace), trace

    return optax.GradientTransformation(lambda params: optax.tree.zeros_like(params), update)


@functools.partial(jax.jit, static_argnames=("name", "variant", "momentum", "rate", "steps"))
def last_point(
    start: Array, data: Array, *, name: str, variant: str, momentum: float, rate: float, steps: int
) -> Array:
    """Run `manifold_muon` with a rate that falls linearly to zero; return the last point."""
    task = TASKS[name]
    manifold = task.manifold()
    schedule = optax.linear_schedule(rate, 0.0, steps)
    clip = {
        WHOLE: None,
        PROJECTED: project_tangent(manifold),
        CARRIED: carried_momentum(manifold, momentum),
    }[variant]
    kept = None if variant == CARRIED else momentum
    tx = manifold_muon(schedule, manifold, kept, clip=clip, track_gap=False)

    def step(carry, _):
        point, state = carry
        updates, state = tx.update(jax.grad(task.cost)(point, data), state, point)
        return (optax.apply_updates(point, updates), state), None

    (point, _), _ = jax.lax.scan(step, (start, tx.init(start)), length=steps)
    return cast(Array, point)


@dataclasses.dataclass(frozen=True)
class TangentMomentum(Study):
    """Does manifold Muon converge on a fixed cost, and must its momentum be tangent?

    Runs `manifold_muon` in float64, with a rate that falls linearly to zero: unchanged, with
    gradients projected onto the tangent space (`clip=project_tangent(manifold)`), and with momentum
    projected again at each new point. Without momentum the three variants take the same steps.
    Records the Riemannian gradient at the last point, and the excess of its cost over the minimum
    that `minimize` reaches from there.
    """

    name: ClassVar[str] = "tangent-momentum"
    traced: ClassVar[tuple[str, ...]] = ("seed",)

    tasks: tuple[str, ...] = option(tuple(TASKS), "what is minimised", choices=tuple(TASKS))
    momenta: tuple[float, ...] = option((0.0, 0.8, 0.95), "decay of the momentum")
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "of the data and the start")
    rate: float = option(0.1, "learning rate of the first step")
    steps: int = option(500, "of a run")

    def __post_init__(self):
        if not all((self.tasks, self.momenta, self.seeds)) or self.steps < 1:
            raise ValueError("name at least one task, momentum, seed and step")
        if not all(0 <= momentum < 1 for momentum in self.momenta):
            raise ValueError(f"momenta must be in [0, 1); got {self.momenta}")

    def cells(self) -> Sequence[Cell]:
        return [
            {"task": task, "momentum": momentum, "variant": variant, "seed": seed}
            for task in self.tasks
            for momentum in self.momenta
            for variant in (VARIANTS if momentum else (WHOLE,))
            for seed in self.seeds
        ]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        task, seed = TASKS[cell["task"]], cell["seed"]
        manifold = task.manifold()
        with jax.enable_x64(True):
            start = manifold.random_point(jax.random.key(seed), task.shape, jnp.float64)
            data = jnp.asarray(task.data(seed))
            point = last_point(
                start, data, name=cell["task"], variant=cell["variant"],
                momentum=cell["momentum"], rate=self.rate, steps=self.steps,
            )  # fmt: skip
            value, gradient = jax.value_and_grad(task.cost)(point, data)
            found = minimize(
                task.cost, manifold, point, (data,), method=TrustRegion(), tolerance=1e-10
            )
            return {
                "above": float(value - found.value),
                "gradient": float(jnp.linalg.norm(manifold.project_tangent(point, gradient))),
                "reason": int(found.reason),
            }

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for row in rows:
            group = found.setdefault(row["task"], {}).setdefault(_name(row), {})
            for key in ("above", "gradient"):
                group.setdefault(key, []).append(row[key])
        return {
            task: {
                name: {key: float(np.median(values)) for key, values in group.items()}
                for name, group in groups.items()
            }
            for task, groups in found.items()
        }

    def table(self, record: Record) -> str:
        summary = record["summary"]
        lines = [
            [name, *(", ".join(short(x, ".0e") for x in summary[task][name].values())
                     for task in summary)]
            for name in next(iter(summary.values()))
        ]  # fmt: skip
        title = "medians: cost above the minimum, Riemannian gradient"
        return f"{text_table(['momentum', *summary], lines)}\n{title}"

    def plot(self, record: Record) -> Any:
        summary = record["summary"]
        figure, [line] = panels(1, len(summary), width=4.0, height=3.8)
        for panel, (task, groups) in zip(line, summary.items(), strict=True):
            names = list(groups)
            for row in record["rows"]:
                if row["task"] == task:
                    colour = COLOURS[VARIANTS.index(row["variant"])]
                    panel.semilogy(names.index(_name(row)), row["gradient"], "o", color=colour)
            panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
            dress(panel, task, "one dot for each seed", "", "")
        line[0].set_ylabel("Riemannian gradient at the end")
        return figure


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['momentum']:g}, {row['variant']}" if row["momentum"] else "none"
