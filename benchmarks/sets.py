"""Time, gap and distance of a step on each weight space, compared with `optax.contrib.muon`.

    python -m benchmarks sets    # fifteen minutes; docs/benchmarks/results/sets.*

Trees and steps are those of `python -m benchmarks steps`. Multipliers carry over between steps, so
each optimizer first takes warm-up steps along gradients of a linear regression. The table shows the
largest gap and distance at the last warm-up step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._harness import command, save_with_table, timed
from benchmarks.steps import MUON, RATE, TREES, declared, optimizers, step_of, title, tree
from manifoldmuon import manifolds
from manifoldmuon.manifolds.retractions import SoftCap
from manifoldmuon.manifolds.solvers import BarzilaiBorwein, LineMultiplier
from manifoldmuon.norms import RootRank, Spectral
from studies.display import markdown_table
from studies.program import parse

WARM_UP = 10


def weight_spaces() -> dict[str, manifolds.Manifold]:
    """Return the sets by name, all with singular values around 1, most of them for training."""
    sphere = manifolds.Hypersphere(RootRank(), ndim=2, step_norm=Spectral()).for_training()
    rows = manifolds.EmbeddingRows(1.0, step_norm=Spectral()).for_training()
    spectral, ball = (
        manifolds.SpectralSphere().for_training(),
        manifolds.SpectralBall().for_training(),
    )
    return {
        "flat": manifolds.Euclidean(Spectral()).for_training(),
        "fixed Frobenius": sphere,
        "fixed Frobenius, two signs": dataclasses.replace(sphere, solver=LineMultiplier()),
        "rows": rows,
        "rows, three signs": dataclasses.replace(rows, solver=BarzilaiBorwein()),
        "spectral sphere": spectral,
        "spectral sphere, one sign": dataclasses.replace(spectral, solver=LineMultiplier(steps=1)),
        "ball": ball,
        "ball, soft cap": dataclasses.replace(ball, retraction=SoftCap()),
        "band 1/2 to 2": manifolds.SpectralBand(0.5, 2.0).for_training(),
        "Stiefel": manifolds.Stiefel().for_training(),
        "Stiefel, ClosedForm()": manifolds.Stiefel(),
    }


def regression(layers: int, width: int, stacked: bool):
    """Return the gradients of a linear regression per matrix, with inputs of decaying variance."""
    target = tree(layers, width, stacked, seed=2)

    def one(key, weight, goal):
        first, second = jax.random.split(key)
        decay = jnp.arange(1, weight.shape[-1] + 1) ** -0.5
        shape = (*weight.shape[:-2], 64, weight.shape[-1])
        inputs = jax.random.normal(first, shape) * decay
        missed = inputs @ (weight - goal).mT
        missed += 0.3 * jax.random.normal(second, missed.shape)
        return missed.mT @ inputs

    def grads(params, key):
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.tree.unflatten(treedef, jax.random.split(key, len(leaves)))
        return jax.tree.map(one, keys, params, target)

    return jax.jit(grads)


def measure(
    layers: int, width: int, stacked: bool, rounds: int, names: list[str], track_gap: bool
) -> dict:
    """Measure a tree: seconds of a step, and gap and distance after warm-up, by weight space."""
    start, grads_of = tree(layers, width, stacked), regression(layers, width, stacked)
    functions, ended = {}, {}
    for name, space in ({MUON: manifolds.Euclidean()} | weight_spaces()).items():
        if name not in (MUON, *names):
            continue
        geometry = declared(space)
        tx = mm.optim.manifold_muon(RATE, geometry, track_gap=track_gap)
        tx = optimizers()[MUON] if name == MUON else tx
        params = jax.jit(functools.partial(mm.optim.project_tree, geometry))(start)
        step, state = jax.jit(step_of(tx)), tx.init(params)
        for key in jax.random.split(jax.random.key(0), WARM_UP):
            grads = grads_of(params, key)
            params, state = step(params, state, grads)
        functions[name] = functools.partial(step, params, state, grads)
        if name != MUON:
            far = jax.jit(functools.partial(mm.optim.monitor_distance, geometry))(params)
            gaps = mm.optim.monitor(state)["gap"] if track_gap else None
            ended[name] = {"gap": largest(gaps), "distance": largest(far)}
    row = {"layers": layers, "width": width, "stacked": stacked, "track_gap": track_gap}
    return row | timed(functions, rounds) | {"ended": ended}


def largest(tree) -> float | None:
    """Return the largest entry of a tree; None if it is empty."""
    leaves = jax.tree.leaves(tree)
    return float(np.max([np.max(leaf) for leaf in leaves])) if leaves else None


def table(rows: list[dict]) -> str:
    """Return a Markdown table of ratios to Optax's optimizer, with gap and distance."""
    names = [name for name in rows[0]["seconds"] if name != MUON]
    lines = []
    for row in rows:
        ratios = [f"{row['seconds'][name] / row['seconds'][MUON]:.2f}" for name in names]
        lines.append([title(row) + ("" if row["track_gap"] else ", no gaps"), *ratios])
        if row["track_gap"]:
            for key in ("gap", "distance"):
                lines.append([key, *(f"{row['ended'][name][key]:.0e}" for name in names)])
    return markdown_table(["tree", *names], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    p, names = command("sets", __doc__, rounds=9), list(weight_spaces())
    p.add_argument("--trees", type=int, nargs="+", default=(0,), metavar="I",
                   help="indices of trees of `steps` (default: 12 of 256)")  # fmt: skip
    p.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME",
                   help="weight spaces to time (default: all)")  # fmt: skip
    options = parse(p, argv, beside=(".md",))
    rows = [
        measure(*TREES[i], rounds=options.rounds, names=options.only, track_gap=track_gap)
        for i in tqdm(options.trees, unit="tree")
        for track_gap in (True, False)
    ]
    save_with_table(options, {"rounds": options.rounds, "rows": rows}, table(rows))


if __name__ == "__main__":
    main()
