"""An architecture, and the optimizer derived from its norm: the loss falls to zero.

python -m examples.hello_world
"""

import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from manifoldmuon.modules import Linear, ReLU


def main(steps: int = 1000) -> jax.Array:
    """Learn random targets; print the losses and return them."""
    net = Linear(10, 256) @ ReLU() @ Linear(256, 256) @ ReLU() @ Linear(256, 784)
    tx = mm.optim.modular(optax.linear_schedule(0.1, 0.0, steps), net)
    weights, inputs, targets = jax.random.split(jax.random.key(0), 3)
    x, y = jax.random.normal(inputs, (128, 784)), jax.random.normal(targets, (128, 10))
    params = net.init(weights)

    def loss(params):
        return jnp.mean((net.apply(params, x) - y) ** 2)

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    _, losses = jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), length=steps))()
    print("step  loss")
    for count in range(0, steps, max(steps // 10, 1)):
        print(f"{count:4}  {losses[count]:.6f}")
    return losses


if __name__ == "__main__":
    main()
