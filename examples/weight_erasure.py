"""Dualized updates overwrite the initial weights; gradients leave them readable.

python -m examples.weight_erasure    # writes runs/weight_erasure.png
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import manifoldmuon as mm
from manifoldmuon.lab import erasure_auc, letter_mask, stable_rank
from manifoldmuon.modules import Linear, ReLU
from studies.datasets import batches, load_digits, standardise


def main(
    steps: int = 500, width: int = 256, out: Path = Path("runs/weight_erasure.png")
) -> dict[str, float]:
    """Train two optimizers from a matrix with a letter; return the AUC of the letter for each."""
    data = standardise(load_digits())
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    net = Linear(10, width) @ ReLU() @ Linear(width, width) @ ReLU() @ Linear(width, 64)
    mask = letter_mask((width, width))
    first, empty, middle, *last = net.init(jax.random.key(0))
    params = (first, empty, middle * mask, *last)
    decay = optax.linear_schedule(0.5, 0.0, steps)
    optimizers = {
        "dualized": mm.optim.modular(decay, net, momentum=None),
        "gradient": optax.sgd(decay),
    }
    order = jnp.asarray(batches(0, len(y), steps, 128))
    figure, readable = Figure(figsize=(9, 3.4), layout="constrained"), {}
    panels = figure.subplots(1, 3)
    panels[0].imshow(np.abs(params[2]), cmap="gray")
    panels[0].set_title("at the start")
    print("updates   AUC of the letter  stable rank of the last update")
    for panel, (name, tx) in zip(panels[1:], optimizers.items(), strict=True):

        def step(carry, rows, tx=tx):
            params, state, _ = carry

            def loss(params):
                scores = net.apply(params, x[rows])
                return optax.softmax_cross_entropy_with_integer_labels(scores, y[rows]).mean()

            updates: Any
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state, updates[2]), None

        run = jax.jit(lambda carry, f=step: jax.lax.scan(f, carry, order)[0])
        trained, _, update = run((params, tx.init(params), params[2]))
        readable[name] = erasure_auc(np.asarray(trained[2]), mask)
        print(f"{name:8} {readable[name]:18.3f}  {float(stable_rank(update)):30.1f}")
        panel.imshow(np.abs(trained[2]), cmap="gray")
        panel.set_title(f"{name}: AUC {readable[name]:.2f}")
    for panel in panels:
        panel.set_axis_off()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=150)
    return readable


if __name__ == "__main__":
    main()
