"""Drift of weights from their manifolds in very long runs of manifold Muon.

    python -m benchmarks.drift    # a few minutes; docs/benchmarks/results/drift.json

Every step has a new Gaussian gradient, momentum 0.95 and a learning rate that decays from 0.1 to
0.001, in float32. Only the retraction of each step keeps the weights on the manifold. The distance
is measured in float64 after *every* step.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._command import command
from manifoldmuon.contrib import Isospectral
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import (
    EmbeddingRows,
    Grassmann,
    Hypersphere,
    Manifold,
    SpectralBall,
    SpectralBand,
    SpectralSphere,
    Stiefel,
)
from manifoldmuon.manifolds.solvers import (
    BarzilaiBorwein,
    ClosedForm,
    DouglasRachford,
    ProjectedPolar,
)
from manifoldmuon.norms import RootRank, Spectral
from studies.program import parse, save

PRESETS = {"accurate": ClosedForm(), "fast": ProjectedPolar()}
SMALL, LARGE = (64, 10), (128, 64)
QUICK = Spectral(TRAINING_MSIGN)
SETS: dict[str, tuple[Manifold, tuple[tuple[int, int], ...]]] = {
    **{f"Stiefel, {name}": (Stiefel(solver=s), (SMALL, LARGE)) for name, s in PRESETS.items()},
    "Grassmann": (Grassmann(), (SMALL,)),
    "fixed Frobenius norm": (Hypersphere(RootRank(), ndim=2, step_norm=QUICK), (SMALL,)),
    "fixed rows": (EmbeddingRows(1.0, step_norm=QUICK, solver=BarzilaiBorwein()), (SMALL,)),
    "spectral sphere": (SpectralSphere(step_norm=QUICK), (SMALL,)),
    "spectral ball": (SpectralBall(step_norm=QUICK, solver=DouglasRachford(2)), (SMALL,)),
    "spectral band": (SpectralBand(0.5, 2, step_norm=QUICK, solver=DouglasRachford(2)), (SMALL,)),
    "fixed singular values": (Isospectral(tuple(np.linspace(1, 0.1, 10).tolist())), (SMALL,)),
}
RATES = (1e-1, 1e-3)
BOUND = 1e-6
CHUNK = 1000


def drift(shape: tuple[int, int], name: str, steps: int, seed: int, bar: tqdm) -> dict:
    """Run a case; return the largest distance of each chunk of steps, and summaries."""
    geometry = SETS[name][0]
    rate = optax.exponential_decay(RATES[0], steps, RATES[1] / RATES[0])
    tx = mm.optim.manifold_muon(rate, geometry)
    weight_key, grad_key = jax.random.split(jax.random.key(seed))
    weight = mm.optim.init_tree(geometry, weight_key, jax.ShapeDtypeStruct(shape, jnp.float32))

    @jax.jit
    def chunk(carry, keys):
        def step(carry, key):
            weight, state = carry
            updates, state = tx.update(jax.random.normal(key, shape), state, weight)
            weight = optax.apply_updates(weight, updates)
            return (weight, state), weight

        return jax.lax.scan(step, carry, keys)

    carry, curve, start = (weight, tx.init(weight)), [], time.perf_counter()
    keys = jax.random.split(grad_key, steps)
    for first in range(0, steps, CHUNK):
        carry, passed = chunk(carry, keys[first : first + CHUNK])
        curve.append(float(distances(geometry, np.asarray(passed, np.float64)).max()))
        bar.set_description(f"{shape[0]} x {shape[1]}, {name}: {np.max(curve):.1e}", refresh=False)
        bar.update(len(passed))
    tenth = max(1, len(curve) // 10)
    return {
        "shape": list(shape),
        "set": name,
        "steps": steps,
        "distance": float(np.max(curve)),
        "distance_first_tenth": float(np.max(curve[:tenth])),
        "distance_last_tenth": float(np.max(curve[-tenth:])),
        "within_bound": bool(np.max(curve) <= BOUND),
        "seconds": time.perf_counter() - start,
        "curve": curve,
    }


def distances(manifold: Manifold, weights: np.ndarray) -> np.ndarray:
    """Return the distance of each weight of a stack, in float64."""
    with jax.enable_x64(True):
        return np.asarray(jax.jit(manifold.distance)(weights))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a run exceeded the bound."""
    parser = command("drift", "Drift from the manifolds in long runs.")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    options = parse(parser, argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    cases = [(shape, name) for name in options.sets for shape in SETS[name][1]]
    with tqdm(total=len(cases) * options.steps, unit="step", dynamic_ncols=True) as bar:
        runs = [drift(*case, options.steps, options.seed, bar) for case in cases]
    for run in runs:
        m, n = run["shape"]
        print(
            f"{m:4} x {n:<3} {run['set']:21} {run['steps']} steps: distance {run['distance']:.1e}"
            f" at most, {run['distance_last_tenth']:.1e} in the last tenth"
        )
    record = {
        "what": "largest distance from the set after any step of manifold Muon in float32",
        "gradients": "Gaussian, a fresh one in every step",
        "momentum": 0.95,
        "learning_rates": list(RATES),
        "bound": BOUND,
        "seed": options.seed,
        "runs": runs,
    }
    save(options, record)
    return 0 if all(run["within_bound"] for run in runs) else 1


if __name__ == "__main__" and (status := main()):  # `python -m benchmarks` continues after a 0
    sys.exit(status)
