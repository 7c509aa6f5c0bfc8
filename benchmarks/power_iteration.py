"""Error of warm-started power iteration on the spectral norms of real updates.

    python -m benchmarks power_iteration    # some minutes; writes power_iteration.json

Warm: a 64-128-128-10 ReLU network learns scikit-learn's digits with batches of 64, with each
layer's update divided by its exact norm; every update of every layer is estimated, starting from
the vector of the step before. Cold: the first estimate for random matrices. Switching: worst
estimates of the base optimizers' updates for sparse and switching gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._command import command
from benchmarks._gradients import GRADIENT_FAMILIES, gradient_sequence
from manifoldmuon.linalg import power_iteration, spectral_norm
from manifoldmuon.norms import PowerIterations
from studies.datasets import load_digits
from studies.program import parse
from studies.records import environment, write_record

SIZES = ((128, 64), (128, 128), (10, 128))
BASES = {
    "SGD": optax.identity(),
    "momentum 0.9": optax.trace(0.9),
    "momentum 0.95, Nesterov": optax.trace(0.95, nesterov=True),
    "Adam": optax.scale_by_adam(),
}
WARM = (1, 2, 3, 4, 6)
COLD = (2, 4, 8, 16, 32)
RATE = 0.03
PERIODS = (3, 10, 50)
SHAPES = ((8, 8), (32, 64), (128, 64))


def warm(base: optax.GradientTransformation, images, labels, steps: int) -> np.ndarray:
    """Return estimate / norm by step (without the first), layer and number of power steps."""
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    pairs = zip(keys, SIZES, strict=True)
    weights = [jax.random.normal(key, size) / np.sqrt(size[1]) for key, size in pairs]
    cold = PowerIterations().cold_start_steps

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for weight in weights[:-1]:
            x = jax.nn.relu(x @ weight.T)
        logits = 4 * x @ weights[-1].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry: Any, key: jax.Array) -> Any:
        weights, state, vectors = carry
        batch = jax.random.randint(key, (64,), 0, len(labels))
        grads = jax.grad(loss)(weights, images[batch], labels[batch])
        updates, state = _update(base, grads, state, weights)
        exact = [spectral_norm(update) for update in updates]
        found = [
            [power_iteration(u, v, n, cold) for n, v in zip(WARM, kept, strict=True)]
            for u, kept in zip(updates, vectors, strict=True)
        ]
        sizes = jnp.array([[size for size, _ in layer] for layer in found])
        ratios = sizes / jnp.array(exact)[:, None]
        vectors = [[v for _, v in f] for f in found]
        weights = [
            w - RATE * u / e * np.sqrt(w.shape[0] / w.shape[1])
            for w, u, e in zip(weights, updates, exact, strict=True)
        ]
        return (weights, state, vectors), ratios

    vectors = [[jnp.zeros(size[1]) for _ in WARM] for size in SIZES]
    start = weights, base.init(weights), vectors
    keys = jax.random.split(jax.random.key(5), steps)
    return np.asarray(jax.jit(lambda c: jax.lax.scan(step, c, keys))(start)[1])[1:]


def _update(base: Any, *arguments: Any) -> Any:
    return base.update(*arguments)


def switching(base: Any, shape: tuple[int, int], steps: int, seed: int) -> dict[str, np.ndarray]:
    """Return norm / estimate for every family, by step and number of power steps."""

    def step(carry: Any, grad: jax.Array) -> Any:
        state, vectors = carry
        update, state = _update(base, grad, state)
        update = update / jnp.maximum(jnp.max(jnp.abs(update)), 1e-30)
        found = [
            power_iteration(update, v, n, PowerIterations().cold_start_steps)
            for n, v in zip(WARM, vectors, strict=True)
        ]
        sizes = jnp.array([size for size, _ in found])
        ratios = spectral_norm(update) / jnp.where(sizes == 0, 1, sizes)
        return (state, [v for _, v in found]), ratios

    start = base.init(jnp.zeros(shape)), [jnp.zeros(shape[1]) for _ in WARM]
    run = jax.jit(lambda grads: jax.lax.scan(step, start, grads)[1])
    ratios = {}
    for family in GRADIENT_FAMILIES:
        parts = []
        for period in PERIODS:
            grads = gradient_sequence(family, shape, steps, period, seed)
            parts.append(np.asarray(run(jnp.float32(grads))))
        ratios[family] = np.concatenate(parts)
    return ratios


def cold(rows: int, decay: bool, seed: int, trials: int = 20) -> list[float]:
    """Return the smallest estimate / norm of random square matrices, by number of power steps."""
    rng = np.random.default_rng(seed)
    matrices = rng.standard_normal((trials, rows, rows))
    if decay:
        spectrum = np.geomspace(1, 1e-3, rows)[:, None]
        matrices = matrices @ (spectrum * rng.standard_normal((trials, rows, rows)))
    exact = np.linalg.norm(matrices, 2, axis=(1, 2))
    x, start = jnp.asarray(matrices, jnp.float32), jnp.zeros((trials, rows))
    return [float(np.min(power_iteration(x, start, n)[0] / exact)) for n in COLD]


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark, print the tables and write the record."""
    parser = command("power_iteration", "Spectral norms by power iteration from kept vectors.")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="of the random matrices")
    options = parse(parser, argv)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    data = load_digits()
    images, labels = (jnp.asarray(x) for x in (data.train_x.reshape(-1, 64), data.train_y))
    rows = []
    for name, base in BASES.items():
        ratios = warm(base, images, labels, options.steps)
        for index, steps in enumerate(WARM):
            part = ratios[..., index].ravel()
            row = {"mean": part.mean(), "percent": np.quantile(part, 0.01), "lowest": part.min()}
            rows.append({"base": name, "steps": steps} | {k: float(v) for k, v in row.items()})
            numbers = "{mean:.4f} {percent:.3f} {lowest:.3f}".format(**rows[-1])
            print(f"{name:24} {steps} steps: {numbers}")
    starts = [
        {"rows": n, "decay": decay, "worst": cold(n, decay, options.seed)}
        for n in (32, 128, 512)
        for decay in (False, True)
    ]
    for start in starts:
        kind = "decaying" if start["decay"] else "Gaussian"
        found = "  ".join(f"{n}: {x:.3f}" for n, x in zip(COLD, start["worst"], strict=True))
        print(f"cold, {start['rows']:3} rows, {kind}: {found}")
    jumps = []
    for name, base in BASES.items():
        for shape in SHAPES:
            for family, ratios in switching(base, shape, options.steps, options.seed).items():
                worst, mean = ratios.max(0).tolist(), ratios.mean(0).tolist()
                row = {"base": name, "shape": shape, "family": family}
                jumps.append(row | {"worst": worst, "mean": mean})
        for n, *pair in zip(WARM, *_worst(jumps, name), strict=True):
            print(f"{name:24} {n} steps, switching: {pair[0]:.2f}, mean {pair[1]:.3f}")
    record = {
        "what": "estimate / spectral norm, by power iteration from vectors kept",
        "training_steps": options.steps,
        "cold_steps_in_training": PowerIterations().cold_start_steps,
        "learning_rate": RATE,
        "seed": options.seed,
        "environment": environment(),
        "warm": rows,
        "cold_steps": list(COLD),
        "cold": starts,
        "what_switching": "spectral norm / estimate, for each number of steps in `warm_steps`",
        "warm_steps": list(WARM),
        "periods": list(PERIODS),
        "switching": jumps,
    }
    print("written:", write_record(options.out, record, overwrite=options.overwrite))


def _worst(rows: list[dict[str, Any]], base: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a base's largest ratio and largest mean of a family, by number of power steps."""
    mine = [row for row in rows if row["base"] == base]
    return np.max([r["worst"] for r in mine], axis=0), np.max([r["mean"] for r in mine], axis=0)


if __name__ == "__main__":
    main()
