"""Hello, world: an MLP learns random targets by steepest descent in its own norm."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

import manifoldmuon as mm
from manifoldmuon.modules import Linear, Module, ReLU
from studies.display import text_table
from studies.reproduction import modula
from studies.study import Cell, Record, Row, Study, option
from studies.training import begin, train


@dataclasses.dataclass(frozen=True)
class HelloWorld(Study):
    """Does an MLP learn random targets as the Modula package publishes it?

    The published protocol draws inputs, targets and weights from the same key; the corrected
    protocol uses three keys. Weights that are nudged by the size of rounding show how far the
    losses are determined.
    """

    name: ClassVar[str] = "hello-world"

    steps: int = option(1000, "number of updates; the learning rate falls linearly to zero")

    def cells(self) -> Sequence[Cell]:
        jobs = [("published", seed, 0) for seed in range(4)]
        jobs += [("published", 0, nudge) for nudge in (1, 2, 3)]
        jobs += [("corrected", seed, 0) for seed in range(4)]
        return [{"protocol": p, "seed": seed, "nudge": nudge} for p, seed, nudge in jobs]

    def run(self, cell: Cell) -> Mapping[str, Any]:
        published_protocol = cell["protocol"] == "published"
        problem = (
            published(cell["seed"], cell["nudge"])
            if published_protocol
            else corrected(cell["seed"])
        )
        losses = _losses(problem.network, self.steps, problem.params, problem.x, problem.y)
        return {"loss": losses[::100]}

    def summarise(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        first = {protocol: next(row for row in rows if row["protocol"] == protocol)
                 for protocol in ("published", "corrected")}  # fmt: skip
        return {protocol: row["loss"] for protocol, row in first.items()}

    def table(self, record: Record) -> str:
        columns = record["summary"]
        lines = [
            [str(100 * i), *(f"{value:.6f}" for value in pair)]
            for i, pair in enumerate(zip(*columns.values(), strict=True))
        ]
        return text_table(["step, seed 0", *columns], lines)


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(network: Module, steps: int, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Train with dualized gradients without momentum; return the loss before every step."""
    schedule = optax.linear_schedule(0.1, 0.0, steps)
    tx = mm.optim.modular(schedule, network, momentum=None)

    def loss(params: Any, _: Any) -> Any:
        return jnp.mean((network.apply(params, x) - y) ** 2)

    return train(tx, loss, begin(tx, params), jnp.arange(steps))[1][0]
