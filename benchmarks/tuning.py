"""Held-out accuracy over the grids behind the learning rates of `studies.digits`.

    python -m benchmarks tuning    # some minutes; docs/benchmarks/results/tuning.json

For each seed a fifth of the training images is held out, and the rest is trained on. The test
images are unused, and the seeds (hence the splits) differ from the job's. Every optimizer has the
job's steps, batch size and linear decay.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks._harness import command
from studies.classification import accuracy, cross_entropy, init_weights, shapes_of
from studies.datasets import batches
from studies.digits.methods import METHODS, SOLVERS, build_adamw
from studies.digits.study import Digits
from studies.estimates import estimate, shown
from studies.program import parse, save

MULTIPLIERS = (1.0, 2.0, 4.0, 8.0)
RATES = {
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (1e-3, 2e-3, 5e-3, 1e-2, 2e-2),
    "sphere": (3e-3, 1e-2, 3e-2, 1e-1),
    "stiefel": (1e-2, 3e-2, 1e-1, 3e-1),
}
WEIGHT_DECAYS = (0.0, 0.1, 1.0, 3.0)


def held_out(settings: Digits, seed: int) -> tuple[np.ndarray, ...]:
    """Return training images and labels, held-out images and labels, and the batch order."""
    data = settings.load(seed)
    shuffled = np.random.default_rng(seed).permutation(len(data.train_y))
    kept = len(shuffled) * 4 // 5
    train, judge = shuffled[:kept], shuffled[kept:]
    order = batches(seed, kept, settings.steps, settings.batch_size)
    return (data.train_x[train], data.train_y[train], data.train_x[judge], data.train_y[judge],
            order)  # fmt: skip


def grid_row(
    settings: Digits, optimizer: str, multiplier: float, weight_decay: float | None, parts: tuple
) -> list[dict]:
    """Return an entry per learning rate: means and 95 % intervals over the seeds."""
    method = METHODS[optimizer]
    shapes = shapes_of((parts[0].shape[-1], *settings.widths, 10))
    geometry = method.geometry and method.geometry(shapes, SOLVERS[settings.solver])
    build = method.build
    if weight_decay is not None:
        build = functools.partial(build_adamw, weight_decay=weight_decay)

    def train(rate, seed, train_x, train_y, judge_x, judge_y, order):
        tx = build(optax.linear_schedule(rate, 0.0, settings.steps), geometry)
        weights = init_weights(seed, shapes)

        def step(carry, batch):
            weights, state = carry
            grads = jax.grad(cross_entropy)(weights, train_x[batch], train_y[batch], multiplier)
            updates, state = tx.update(grads, state, weights)
            moved: Any = optax.apply_updates(weights, updates)
            return (moved, state), None

        (weights, _), _ = jax.lax.scan(step, (weights, tx.init(weights)), order)
        return (
            cross_entropy(weights, train_x, train_y, multiplier),
            cross_entropy(weights, judge_x, judge_y, multiplier),
            100 * accuracy(weights, judge_x, judge_y),
        )

    @jax.jit
    def train_all(rates, *seeds):
        # Sequential: on CPUs XLA's batched products are slower than single products.
        return jax.lax.map(lambda rate: jax.lax.map(lambda x: train(rate, *x), seeds), rates)

    found = train_all(jnp.asarray(RATES[optimizer]), jnp.asarray(settings.seeds), *parts)
    named = zip(("train_loss", "held_out_loss", "held_out_accuracy"), found, strict=True)
    table = {name: np.asarray(value, np.float64) for name, value in named}
    common = {"optimizer": optimizer, "multiplier": multiplier, "weight_decay": weight_decay}
    return [
        common | {"learning_rate": rate} | {key: estimate(table[key][i]) for key in table}
        for i, rate in enumerate(RATES[optimizer])
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grids."""
    parser = command("tuning", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(100, 110)))
    parser.add_argument("--steps", type=int, default=Digits().steps)
    parser.add_argument("--optimizers", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parse(parser, argv)
    settings = Digits(steps=options.steps, seeds=tuple(options.seeds))
    parts = tuple(map(np.stack, zip(*(held_out(settings, s) for s in settings.seeds), strict=True)))
    cases = [
        (optimizer, multiplier, decay)
        for optimizer in options.optimizers
        for decay in (WEIGHT_DECAYS if optimizer == "adamw" else (None,))
        for multiplier in MULTIPLIERS
    ]
    rows = []
    for case in tqdm(cases, unit="grid"):
        rows += grid_row(settings, *case, parts)
    for row in rows:
        score = row["held_out_accuracy"]
        print(
            f"{row['optimizer']:8} x{row['multiplier']:g} lr {row['learning_rate']:<6g}"
            f" {shown(score, '.2f')} %, weight decay {row['weight_decay']}"
        )
    record = {"settings": settings.settings(), "rows": rows}
    for derived in ("learning_rates", "multiplier", "optimizers"):  # these are what is tuned
        del record["settings"][derived]
    save(options, record)


if __name__ == "__main__":
    main()
