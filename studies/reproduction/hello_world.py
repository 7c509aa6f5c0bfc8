"""Hello, world: an MLP learns random targets by steepest descent in its own norm.

    python -m studies.reproduction.hello_world

The published protocol (documentation of the Modula package) draws inputs, targets and weights
from the same key; the corrected protocol uses three keys. The loss is printed every hundred steps,
and written to a record.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import manifoldmuon as mm
from manifoldmuon.modules import Linear, Module, ReLU
from studies.program import command, interrupted, parse, progress, save
from studies.reproduction import modula

STEPS, CHUNK = 1000, 20


class Problem(NamedTuple):
    """Network, initial weights, inputs and targets."""

    network: Module
    params: Any
    x: jax.Array
    y: jax.Array


def corrected(seed: int) -> Problem:
    """Return a problem with independent keys, weights from `init` and exact duality maps."""
    relu = ReLU(sensitivity=1.0)
    network = Linear(10, 256) @ relu @ Linear(256, 256) @ relu @ Linear(256, 784)
    keys = jax.random.split(jax.random.key(seed), 3)
    x, y = jax.random.normal(keys[1], (128, 784)), jax.random.normal(keys[2], (128, 10))
    return Problem(network, network.init(keys[0]), x, y)


def published(seed: int, nudge: int = 0) -> Problem:
    """Return a problem with a single key, and ten Newton-Schulz steps for weights and updates.

    The shared key makes the targets a copy of the first inputs.

    Args:
      seed: seed; 0 is published.
      nudge: see `nudged`.
    """
    method = modula.TEN_QUINTICS
    network = modula.mlp(784, 256, 10, method)
    key = jax.random.key(seed)
    params = nudged(modula.init(network, key, method), nudge)
    x, y = jax.random.normal(key, (128, 784)), jax.random.normal(key, (128, 10))
    return Problem(network, params, x, y)


def nudged(params: Any, nudge: int) -> Any:
    """Perturb weights by a relative 1e-7, the size of a change in summation order.

    Args:
      params: the weights.
      nudge: seed of the perturbation; 0 for none.
    """
    key = jax.random.key(nudge)
    size = 1e-7 if nudge else 0.0
    return jax.tree.map(lambda w: w + size * w * jax.random.normal(key, w.shape), params)


def optimizer(network: Module) -> optax.GradientTransformation:
    """Build dualized gradients without momentum; the learning rate decays linearly to zero."""
    return mm.optim.modular(optax.linear_schedule(0.1, 0.0, STEPS), network, momentum=None)


@functools.partial(jax.jit, static_argnums=0)
def chunk(network: Module, carry: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Take `CHUNK` steps; also return the losses before them."""

    def loss(params):
        return jnp.mean((network.apply(params, x) - y) ** 2)

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer(network).update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, carry, length=CHUNK)


def train(problem: Problem, bar: tqdm) -> list[float]:
    """Train once; return the loss before every hundredth step."""
    network, params, x, y = problem
    carry, losses = (params, optimizer(network).init(params)), []
    for _ in range(0, STEPS, CHUNK):
        carry, values = chunk(network, carry, x, y)
        losses += values.tolist()
        bar.set_postfix_str(f"loss {losses[-1]:.6f}", refresh=False)
        bar.update(CHUNK)
    return losses[::100]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both protocols; return the exit status."""
    p = command(
        "studies.reproduction.hello_world", "An MLP learns random targets, by both protocols."
    )
    given = parse(p, argv)
    jobs = [{"protocol": "published", "seed": seed, "nudge": 0} for seed in range(4)]
    jobs += [{"protocol": "published", "seed": 0, "nudge": nudge} for nudge in (1, 2, 3)]
    jobs += [{"protocol": "corrected", "seed": seed} for seed in range(4)]
    runs = []
    try:
        with progress(STEPS * len(jobs)) as bar:
            for job in jobs:
                bar.set_description("{protocol}, seed {seed}".format(**job))
                start = {"published": published, "corrected": corrected}[job["protocol"]]
                options = {key: value for key, value in job.items() if key != "protocol"}
                runs.append(job | {"loss": train(start(**options), bar)})
    except KeyboardInterrupt:
        return interrupted()
    save(given, {"steps": STEPS, "runs": runs})
    print("step  published  corrected")
    for i, (a, b) in enumerate(zip(runs[0]["loss"], runs[-4]["loss"], strict=True)):
        print(f"{100 * i:4}   {a:.6f}   {b:.6f}")
    print("written:", given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
