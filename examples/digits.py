"""AdamW, Muon and manifold Muon on the digits: only the last keeps its singular values.

python -m examples.digits    # writes runs/digits.png; `make train` has seeds and options
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import manifoldmuon as mm
from manifoldmuon.manifolds import Euclidean, Stiefel
from manifoldmuon.norms import RMSToRMS
from studies.classification import accuracy, cross_entropy, init_weights
from studies.datasets import batches, load_digits, standardise

SHAPES, MULTIPLIER = [(128, 64), (64, 128), (10, 64)], 4.0
OPTIMIZERS = {
    "AdamW": lambda rate: optax.adamw(rate(3e-3), weight_decay=1.0),
    "Muon": lambda rate: mm.optim.muon(rate(5e-3), Euclidean(RMSToRMS())),
    "manifold Muon": lambda rate: mm.optim.manifold_muon(rate(0.1), Stiefel()),
}


def main(steps: int = 500, out: Path = Path("runs/digits.png")) -> dict[str, float]:
    """Train with each optimizer, print a table, draw singular values; return the accuracies."""
    data = standardise(load_digits())
    order = jnp.asarray(batches(0, len(data.train_y), steps, 128))
    train_x, train_y, test_x, test_y = map(jnp.asarray, data[:4])
    figure, correct = Figure(figsize=(6, 3.5), layout="constrained"), {}
    panel = figure.subplots()
    print(f"{'':14} test accuracy  singular values  Lipschitz bound")
    for number, (name, build) in enumerate(OPTIMIZERS.items()):
        tx = build(lambda peak: optax.linear_schedule(peak, 0.0, steps))

        def step(carry, rows, tx=tx):
            weights, state = carry
            grads = jax.grad(cross_entropy)(weights, train_x[rows], train_y[rows], MULTIPLIER)
            updates, state = tx.update(grads, state, weights)
            weights: Any = optax.apply_updates(weights, updates)
            return (weights, state), [jnp.linalg.svd(w, compute_uv=False) for w in weights]

        weights: Any = init_weights(0, SHAPES)
        carry = weights, tx.init(weights)
        (weights, _), values = jax.jit(lambda c, o, f=step: jax.lax.scan(f, c, o))(carry, order)
        correct[name] = float(accuracy(weights, test_x, test_y))
        every = np.concatenate(values, axis=-1)
        bound = MULTIPLIER * np.prod([layer[-1].max() for layer in values])
        low, high = every.min(axis=-1), every.max(axis=-1)
        print(f"{name:14} {correct[name]:13.1%}  {low[-1]:6.3f} to {high[-1]:5.3f}  {bound:15.1f}")
        panel.fill_between(range(steps), low, high, color=f"C{number}", alpha=0.3, label=name)
    panel.set(xlabel="step", title="Singular values of all layers: smallest to largest")
    panel.legend()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out)
    return correct


if __name__ == "__main__":
    main()
