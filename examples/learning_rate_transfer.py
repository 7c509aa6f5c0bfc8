"""The best learning rate of modular descent stays the same as a network grows wider.

python -m examples.learning_rate_transfer
"""

import functools

import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from manifoldmuon.lab import best_rate
from manifoldmuon.modules import Module, mlp
from studies.datasets import batches, load_digits, standardise

EXPONENTS = range(-6, 2)


@functools.partial(jax.jit, static_argnums=0)
def train(net: Module, rate: jax.Array, x: jax.Array, y: jax.Array, order: jax.Array) -> jax.Array:
    """Return the mean loss of the last fifth of the steps."""
    tx = mm.optim.modular(lambda count: rate * (1 - count / len(order)), net)

    def step(carry, rows):
        params, state = carry

        def loss(params):
            scores = net.apply(params, x[rows])
            return optax.softmax_cross_entropy_with_integer_labels(scores, y[rows]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = net.init(jax.random.key(0))
    losses = jax.lax.scan(step, (params, tx.init(params)), order)[1]
    return losses[-(-4 * len(order) // 5) :].mean()


def main(widths: tuple[int, ...] = (32, 64, 128, 256), steps: int = 200) -> dict[int, float | None]:
    """Sweep the rate at each width; return log2 of the best rates."""
    data = standardise(load_digits())
    x, y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)
    order = jnp.asarray(batches(0, len(y), steps, 64))
    best = {}
    print("width  " + "".join(f"   2^{k:<3}" for k in EXPONENTS) + " best")
    for width in widths:
        net = mlp(10, 64, width, 3)
        losses = [float(train(net, jnp.float32(2.0**k), x, y, order)) for k in EXPONENTS]
        best[width] = best_rate(EXPONENTS, [losses]).log2_rate
        cells = "".join(f"{loss:8.4f}" for loss in losses)
        print(f"{width:5}  {cells}  " + ("-" if best[width] is None else f"2^{best[width]:.2f}"))
    return best


if __name__ == "__main__":
    main()
