"""Cost of a step on each manifold with a closed form, relative to Muon's five steps.

    python -m benchmarks closed_forms    # two minutes; docs/benchmarks/results/closed_forms.*

Times are medians within one run, on a Gaussian gradient: the direction with its certificate, and
the retraction of a step of rate 0.02. Muon's direction is unconstrained, from `optax.contrib`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._command import command, save_with_table
from benchmarks.solvers import MUON, muon_direction
from manifoldmuon.contrib import Isospectral
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Grassmann, Manifold
from manifoldmuon.norms import Spectral
from studies.display import markdown_table
from studies.program import parse
from studies.timing import interleaved_seconds

SHAPES = ((3072, 128), (768, 256), (256, 192), (128, 64), (64, 10))
RATE = 0.02


def sets(shape: tuple[int, int]) -> dict[str, Manifold]:
    """Return every manifold at its default, and Grassmann also with `muon`'s msign."""
    values = tuple(np.linspace(1, 0.3, min(shape)).tolist())
    return {
        "Grassmann": Grassmann(),
        "Grassmann, four steps": Grassmann(step_norm=Spectral(TRAINING_MSIGN)),
        "Isospectral": Isospectral(values),
    }


@functools.partial(jax.jit, static_argnums=0)
def steepest(manifold: Manifold, point, grad):
    answer = manifold.steepest(point, grad, ())
    return answer.direction, answer.gap


@functools.partial(jax.jit, static_argnums=0)
def retract(manifold: Manifold, point, vector):
    return manifold.retract(point, vector)


def measure(shape: tuple[int, int], rounds: int) -> dict:
    """Return seconds of Muon's direction and of each direction and retraction; and the gaps."""
    grad = jnp.float32(np.random.default_rng(0).standard_normal(shape))
    functions: dict = {MUON: functools.partial(muon_direction, grad)}
    gaps = {}
    for name, manifold in sets(shape).items():
        draw = functools.partial(manifold.random_point, shape=shape, dtype=jnp.float32)
        point = jax.jit(draw)(jax.random.key(0))
        direction, gap = steepest(manifold, point, grad)
        gaps[name] = float(gap)
        functions[name] = functools.partial(steepest, manifold, point, grad)
        functions[f"{name}: retraction"] = functools.partial(
            retract, manifold, point, -RATE * direction
        )
    return {"shape": list(shape), "seconds": interleaved_seconds(functions, rounds), "gaps": gaps}


def table(rows: list[dict]) -> str:
    """Return ratios to Muon, as direction + retraction, and the largest reported gap."""
    shapes = [" x ".join(str(side) for side in row["shape"]) for row in rows]
    lines = []
    for name in rows[0]["gaps"]:
        cells = []
        for row in rows:
            seconds = row["seconds"]
            parts = (seconds[key] / seconds[MUON] for key in (name, f"{name}: retraction"))
            cells.append(" + ".join(f"{part:.2f}" for part in parts))
        gap = np.max([row["gaps"][name] for row in rows])
        lines.append([name, *cells, f"{gap:.1e}"])
    return markdown_table(["", *shapes, "gap, at most"], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = command("closed_forms", "What directions in closed form cost beside Muon's.")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    options = parse(parser, argv, beside=(".md",))
    rows = [measure(shape, options.rounds) for shape in SHAPES]
    save_with_table(options, {"rounds": options.rounds, "rate": RATE, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
