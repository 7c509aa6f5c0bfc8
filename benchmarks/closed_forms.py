"""Time of direction and retraction on subspaces, compared with Muon's.

    python -m benchmarks closed_forms    # two minutes; docs/benchmarks/results/closed_forms.*

The gradient is Gaussian; the direction comes with its gap, and the retracted step has rate 0.02.
Muon's direction is unconstrained, from `optax.contrib`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import command, save_with_table, timed
from benchmarks.solvers import MUON, muon_direction
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Grassmann, Manifold
from manifoldmuon.norms import Spectral
from studies.display import markdown_table
from studies.program import parse

SHAPES = ((3072, 128), (768, 256), (256, 192), (128, 64), (64, 10))
RATE = 0.02


@functools.partial(jax.jit, static_argnums=0)
def steepest(manifold: Manifold, point: jax.Array, grad: jax.Array) -> tuple[Any, Any]:
    """Return direction and gap."""
    answer = manifold.steepest(point, grad, ())
    return answer.direction, answer.gap


def measure(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Time Muon's direction, and each set's direction and retraction; return gaps, too."""
    manifolds: dict[str, Manifold] = {
        "Grassmann": Grassmann(),
        "Grassmann, four steps": Grassmann(step_norm=Spectral(TRAINING_MSIGN)),
    }
    grad = jnp.float32(np.random.default_rng(0).standard_normal(shape))
    functions: dict[str, Any] = {MUON: functools.partial(muon_direction, grad)}
    gaps = {}
    for name, manifold in manifolds.items():
        draw = functools.partial(manifold.random_point, shape=shape, dtype=jnp.float32)
        point = jax.jit(draw)(jax.random.key(0))
        functions[name] = functools.partial(steepest, manifold, point, grad)
        direction, gap = functions[name]()
        gaps[name] = float(gap)
        retract = functools.partial(jax.jit(manifold.retract), point, -RATE * direction)
        functions[f"{name}: retraction"] = retract
    return {"shape": list(shape)} | timed(functions, rounds) | {"gaps": gaps}


def table(rows: list[dict]) -> str:
    """Return ratios to Muon, as direction + retraction, and the largest reported gap."""
    shapes = [" x ".join(map(str, row["shape"])) for row in rows]
    lines = []
    for name in rows[0]["gaps"]:
        pairs = [
            [row["seconds"][key] / row["seconds"][MUON] for key in (name, f"{name}: retraction")]
            for row in rows
        ]
        gap = np.max([row["gaps"][name] for row in rows])
        lines.append([name, *(f"{a:.2f} + {b:.2f}" for a, b in pairs), f"{gap:.1e}"])
    return markdown_table(["", *shapes, "gap, at most"], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parse(command("closed_forms", __doc__, rounds=7), argv, beside=(".md",))
    rows = [measure(shape, options.rounds) for shape in SHAPES]
    save_with_table(options, {"rounds": options.rounds, "rate": RATE, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
