"""Distance of weights from their sets in runs of 100,000 steps in float32.

    python -m benchmarks drift    # a few minutes; docs/benchmarks/results/drift.json

Every step has a new Gaussian gradient, momentum 0.95 and a learning rate that decays from 0.1 to
0.001. Only the retraction of each step keeps the weights on the manifold. The distance is measured
in float64 after *every* step.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from benchmarks._harness import command
from manifoldmuon import manifolds
from manifoldmuon.linalg import TRAINING_MSIGN
from manifoldmuon.manifolds import solvers
from manifoldmuon.norms import RootRank, Spectral
from studies.program import parse, save

PRESETS: dict[str, solvers.StiefelSolver] = {
    "ClosedForm()": solvers.ClosedForm(),
    "ProjectedPolar()": solvers.ProjectedPolar(),
}
SMALL, LARGE = (64, 10), (128, 64)
QUICK = Spectral(TRAINING_MSIGN)
SETS: dict[str, manifolds.Manifold] = {
    **{f"Stiefel, {name}": manifolds.Stiefel(solver=solver) for name, solver in PRESETS.items()},
    "Grassmann": manifolds.Grassmann(),
    "fixed Frobenius norm": manifolds.Hypersphere(RootRank(), ndim=2, step_norm=QUICK),
    "fixed rows": manifolds.EmbeddingRows(1.0, step_norm=QUICK, solver=solvers.BarzilaiBorwein()),
    "spectral sphere": manifolds.SpectralSphere(step_norm=QUICK),
    "spectral ball": manifolds.SpectralBall(step_norm=QUICK, solver=solvers.DouglasRachford(2)),
    "spectral band": manifolds.SpectralBand(
        0.5, 2, step_norm=QUICK, solver=solvers.DouglasRachford(2)
    ),
}
RATES = (1e-1, 1e-3)
BOUND = 1e-6
CHUNK = 1000


def rate_of(steps: int) -> optax.Schedule:
    """Return the learning rate of a run."""
    return optax.exponential_decay(RATES[0], steps, RATES[1] / RATES[0])


def walk(
    tx: Any,
    geometry: manifolds.Manifold,
    shape: tuple[int, int],
    steps: int,
    seed: int = 0,
    dtype: Any = jnp.float32,
    watched: Callable[[Any, Any], tuple[Any, ...]] = lambda weight, state: (weight,),
) -> np.ndarray:
    """Descend along Gaussian gradients and return distances from the set, in float64.

    Args:
      tx: optimizer.
      geometry: the weight's manifold.
      shape: the weight's shape.
      steps: number of steps.
      seed: seed of weight and gradients.
      dtype: the weight's dtype.
      watched: arrays to measure, as a function of weight and state.

    Returns:
      Largest distance in each chunk of steps, with a column for each watched array.
    """
    weight_key, grad_key = jax.random.split(jax.random.key(seed))
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    weight = mm.optim.init_tree(geometry, weight_key, like).astype(dtype)

    @jax.jit
    def chunk(carry, keys):
        def step(carry, key):
            weight, state = carry
            updates, state = tx.update(jax.random.normal(key, shape), state, weight)
            moved: Any = optax.apply_updates(weight, updates)
            return (moved, state), watched(moved, state)

        return jax.lax.scan(step, carry, keys)

    carry, curve = (weight, tx.init(weight)), []
    keys = jax.random.split(grad_key, steps)
    for first in tqdm(range(0, steps, CHUNK), unit="thousand steps", leave=False):
        carry, passed = chunk(carry, keys[first : first + CHUNK])
        with jax.enable_x64(True):
            stacks = [np.asarray(x.astype(jnp.float32), np.float64) for x in passed]
            curve.append([float(jax.jit(geometry.distance)(x).max()) for x in stacks])
    return np.array(curve)


def last_tenth(curve: np.ndarray) -> np.ndarray:
    """Return the largest distances in the last tenth of the steps."""
    return np.max(curve[-max(1, len(curve) // 10) :], axis=0)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a run exceeded the bound."""
    parser = command("drift", __doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    options = parse(parser, argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    runs = []
    for name in options.sets:
        for shape in (SMALL, LARGE) if name.startswith("Stiefel") else (SMALL,):
            tx = mm.optim.manifold_muon(rate_of(options.steps), SETS[name])
            curve = walk(tx, SETS[name], shape, options.steps, options.seed)[:, 0]
            run = {"shape": list(shape), "set": name, "steps": options.steps}
            run |= {"distance": float(curve.max())}
            run |= {"distance_last_tenth": float(last_tenth(curve)), "curve": curve.tolist()}
            runs.append(run | {"within_bound": bool(curve.max() <= BOUND)})
            print(
                f"{shape[0]:4} x {shape[1]:<3} {name:21} {options.steps} steps: distance"
                f" {curve.max():.1e} at most, {last_tenth(curve):.1e} in the last tenth"
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


if __name__ == "__main__":
    sys.exit(main())
