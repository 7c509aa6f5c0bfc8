"""Time and compile time of a step on a transformer's matrices, compared with Optax.

    python -m benchmarks steps    # eleven minutes; docs/benchmarks/results/steps.*

A tree holds the matrices q, k, v, o, up and down of every layer, with the layers separate or
stacked as for `jax.lax.scan`. A step is `update` and `apply_updates`, compiled together. Compile
times are for the first call, including tracing.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._harness import command, save_with_table, timed
from manifoldmuon.linalg import DEFAULT_MSIGN as EXACT
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import Euclidean, Hypersphere, Manifold, Stiefel
from manifoldmuon.manifolds.solvers import ClosedForm, ProjectedPolar
from manifoldmuon.norms import RMSToRMS
from studies.display import markdown_table
from studies.program import parse

RATE = 0.02
# layers, width, whether the layers are stacked
TREES: tuple[tuple[int, int, bool], ...] = (
    (12, 256, False),
    (12, 256, True),
    (48, 128, False),
    (4, 768, False),
)
MUON, ADAM = "optax.contrib.muon", "optax.adam"
# Names of `optimizers` that other benchmarks compare.
OURS = (
    "muon",
    "muonh",
    "adamh",
    "manifold_muon, ProjectedPolar()",
    "manifold_muon, ClosedForm()",
)

Step = Callable[[Any, Any, Any], Any]


def shapes_of(width: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of one layer's matrices."""
    shapes = dict.fromkeys("qkvo", (width, width))
    return shapes | {"up": (4 * width, width), "down": (width, 4 * width)}


def tree(layers: int, width: int, stacked: bool, seed: int = 0) -> dict[str, Any]:
    """Draw orthonormal matrices in a transformer's shapes."""
    rng, shapes = np.random.default_rng(seed), shapes_of(width)

    def one(shape: tuple[int, int]) -> np.ndarray:
        tall = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))[0]
        return (tall if shape[0] >= shape[1] else tall.T).astype(np.float32)

    made = [{name: one(shape) for name, shape in shapes.items()} for _ in range(layers)]
    if stacked:
        return {name: jnp.stack([layer[name] for layer in made]) for name in shapes}
    return {f"layer{i}": jax.tree.map(jnp.asarray, layer) for i, layer in enumerate(made)}


def declared(space: Manifold) -> Callable[..., Any]:
    """Return the geometry of matrices with any number of stacked axes."""
    return lambda path, leaf: space.stacked(len(leaf.shape) - 2)


def optimizers() -> dict[str, optax.GradientTransformation]:
    """Return the optimizers by name; in each compared group the first is from Optax."""

    def muon(method=None):
        return mm.optim.muon(RATE, declared(Euclidean(RMSToRMS(method))))

    def matrices(params):
        # By default Optax's Muon takes only arrays of two axes as matrices.
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), params)

    def drop_in(method=None):
        return mm.optim.optax_muon(RATE, muon_weight_dimension_numbers=matrices, method=method)

    return {
        MUON: optax.contrib.muon(RATE, muon_weight_dimension_numbers=matrices),
        "optim.optax_muon": drop_in(),
        "optim.optax_muon, TRAINING_MSIGN": drop_in(TRAINING_MSIGN),
        "muon": muon(),
        "muon, exact": muon(EXACT),
        "manifold_muon, ProjectedPolar()": mm.optim.manifold_muon(
            RATE, declared(Stiefel(solver=ProjectedPolar()))
        ),
        "manifold_muon, ClosedForm()": mm.optim.manifold_muon(
            RATE, declared(Stiefel(solver=ClosedForm()))
        ),
        "muonh": mm.optim.muonh(RATE, declared(Hypersphere(ndim=2))),
        ADAM: optax.adam(RATE),
        "adamh": mm.optim.adamh(RATE, declared(Hypersphere(ndim=2))),
        "normed Adam": optax.chain(
            mm.optim.normalize(optax.scale_by_adam(), declared(Euclidean(RMSToRMS()))),
            optax.scale_by_learning_rate(RATE),
        ),
    }


def step_of(tx: optax.GradientTransformation) -> Step:
    """Return a whole step, to be compiled as a single program."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def measure(
    params: Any, grads: Any, candidates: dict[str, optax.GradientTransformation], rounds: int
) -> dict[str, dict[str, float]]:
    """Measure a tree: seconds of a step and of its compilation, by optimizer."""
    compiled, functions = {}, {}
    for name, tx in candidates.items():
        state, step = tx.init(params), jax.jit(step_of(tx))
        start = time.perf_counter()
        jax.block_until_ready(step(params, state, grads))
        compiled[name] = time.perf_counter() - start
        functions[name] = functools.partial(step, params, state, grads)
    return timed(functions, rounds) | {"compile_seconds": compiled}


def title(row: dict) -> str:
    """Return the name of a row's tree."""
    return f"{row['layers']} of {row['width']}, {'' if row['stacked'] else 'un'}stacked"


def table(rows: list[dict]) -> str:
    """Return Markdown tables of ratios to Optax's optimizers: the step, trace and compile."""
    names = [name for name in rows[0]["seconds"] if name not in (MUON, ADAM)]

    def ratio(row: dict, part: str, name: str, against: str = MUON) -> str:
        found = row[part]
        return f"{found[name] / found[against]:.2f}" if against in found else ""

    steps, compiling = [], [[MUON, *(f"{row['compile_seconds'][MUON]:.1f} s" for row in rows)]]
    for name in names:
        adam = name in ("adamh", "normed Adam")
        cells = [ratio(row, "seconds", name, ADAM if adam else MUON) for row in rows]
        steps.append([f"{name}, to {ADAM}" if adam else name, *cells])
        compiling.append([name, *(ratio(row, "compile_seconds", name) for row in rows)])
    trees = [title(row) for row in rows]
    both = {"step": steps, "trace and compile": compiling}
    return "\n\n".join(markdown_table([name, *trees], lines) for name, lines in both.items())


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p = command("steps", __doc__, rounds=9)
    p.add_argument("--trees", type=int, nargs="+", default=range(len(TREES)), metavar="I",
                   help="indices of the trees (default: all)")  # fmt: skip
    p.add_argument("--only", nargs="+", default=list(optimizers()), metavar="NAME")
    options = parse(p, argv, beside=(".md",))
    candidates = {name: tx for name, tx in optimizers().items() if name in options.only}
    rows = []
    for layers, width, stacked in tqdm([TREES[i] for i in options.trees], unit="tree"):
        params, grads = tree(layers, width, stacked), tree(layers, width, stacked, seed=1)
        row = {"layers": layers, "width": width, "stacked": stacked}
        rows.append(row | measure(params, grads, candidates, options.rounds))
    save_with_table(options, {"rounds": options.rounds, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
