"""Manifold Muon on CIFAR-10: the exact direction against cheaper directions, and AdamW.

    python -m studies.reproduction.manifold_cifar --data-dir DIR

Follows the protocol of "Modular Manifolds": a ReLU network 3072-128-64-10 without biases, weights
with orthonormal columns, cross-entropy, batches of 1024 standardised images, five epochs, the
learning rate 0.1 decaying linearly to zero, no momentum. With fewer than 50,000 images five epochs
have fewer steps, so a second set of runs takes the 245 steps of the whole set.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.manifolds.solvers import ProjectedPolar
from manifoldmuon.norms import Spectral
from studies.classification import accuracy, cross_entropy, init_weights, shapes_of
from studies.datasets import FlatImages, batches, load_cifar10, standardise
from studies.estimates import Mean
from studies.program import command, interrupted, load, parse, progress, save

HIDDEN, BATCH, EPOCHS, SEEDS, CHUNK = (128, 64), 1024, 5, (0, 1, 2), 49
WHOLE_SET = 50_000

Schedule = optax.Schedule


def without_projection(learning_rate: Schedule) -> optax.GradientTransformation:
    """Build msign of the gradient without projection; only the retraction keeps the manifold."""
    return mm.optim.chain(
        mm.optim.scale_by_steepest(Euclidean(Spectral())),
        optax.scale_by_learning_rate(learning_rate),
        mm.optim.retract(Stiefel()),
    )


def stiefel(learning_rate: Schedule, manifold: Stiefel) -> optax.GradientTransformation:
    """Build manifold Muon."""
    return mm.optim.manifold_muon(learning_rate, manifold, momentum=None)


METHODS = {
    "exact": (0.1, functools.partial(stiefel, manifold=Stiefel())),
    "one step": (0.1, functools.partial(stiefel, manifold=Stiefel(solver=ProjectedPolar()))),
    "no projection": (0.1, without_projection),
    "adamw": (3e-3, optax.adamw),
}
"""Peak learning rate and optimizer."""


def optimizer(method: str, steps: int) -> optax.GradientTransformation:
    """Return the optimizer with a learning rate that decays linearly to zero."""
    rate, build = METHODS[method]
    return build(optax.linear_schedule(rate, 0.0, steps))


@functools.partial(jax.jit, static_argnums=(0, 1))
def chunk(method: str, steps: int, carry: Any, x: jax.Array, y: jax.Array, order: jax.Array) -> Any:
    """Take a step for every row of `order`."""

    def step(carry, batch):
        weights, state = carry
        grads = jax.grad(cross_entropy)(weights, x[batch], y[batch], 1.0)
        updates, state = optimizer(method, steps).update(grads, state, weights)
        return (optax.apply_updates(weights, updates), state), None

    return jax.lax.scan(step, carry, order)[0]


def train(method: str, data: FlatImages, steps: int, seed: int, bar: tqdm) -> dict[str, float]:
    """Train once; return the final accuracies and extreme singular values."""
    weights = init_weights(seed, shapes_of(data.widths(HIDDEN)))
    carry = weights, optimizer(method, steps).init(weights)
    train_x, train_y, test_x, test_y = (jnp.asarray(part) for part in data[:4])
    order = jnp.asarray(batches(seed, len(train_y), steps, BATCH))
    for start in range(0, steps, CHUNK):
        rows = order[start : start + CHUNK]
        carry = chunk(method, steps, carry, train_x, train_y, rows)
        bar.update(len(rows))
    weights = carry[0]
    singular = np.concatenate([np.linalg.svd(np.asarray(w), compute_uv=False) for w in weights])
    return {
        "test_accuracy": float(accuracy(weights, test_x, test_y)),
        "train_accuracy": float(accuracy(weights, train_x, train_y)),
        "smallest": float(singular.min()),
        "largest": float(singular.max()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run every method with three seeds; return the exit status."""
    p = command(
        "studies.reproduction.manifold_cifar", "Manifold Muon and AdamW on CIFAR-10.", "cifar10"
    )
    given = parse(p, argv)
    data = standardise(load(p, load_cifar10, given.data_dir))
    images = len(data.train_y)
    if images < BATCH:
        p.error(f"a batch takes {BATCH} images, and there are {images}")
    lengths = sorted({-(-EPOCHS * count // BATCH) for count in (images, WHOLE_SET)})
    runs = []
    try:
        with progress(len(METHODS) * len(SEEDS) * sum(lengths)) as bar:
            for steps in lengths:
                for method, seed in ((m, s) for m in METHODS for s in SEEDS):
                    bar.set_description(f"{method}, {steps} steps, seed {seed}")
                    run = {"method": method, "steps": steps, "seed": seed}
                    runs.append(run | train(method, data, steps, seed, bar))
    except KeyboardInterrupt:
        return interrupted()
    settings = {"hidden": HIDDEN, "batch": BATCH, "epochs": EPOCHS, "images": images}
    save(given, {"settings": settings, "runs": runs})
    for steps in lengths:
        for method in METHODS:
            found = [r["test_accuracy"] for r in runs
                     if r["method"] == method and r["steps"] == steps]  # fmt: skip
            print(f"{steps} steps  {method:<14} {Mean.of(found).text('.3f')}")
    print("written:", given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
