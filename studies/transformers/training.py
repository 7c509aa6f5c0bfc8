"""Train in compiled chunks; all rates, decays, lengths and seeds share a compiled program."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from studies.datasets import Text, batches, load_text, windows
from studies.transformers.methods import Knobs, branch_factor, first_matrices, optimizer
from studies.transformers.network import BRANCH_ENDS, Size, loss_of, scores_of
from studies.transformers.rounding import ROUNDINGS

CHUNK = 50
"""Steps per call of the compiled program."""

WARM = 0.05
"""Warm-up fraction of the steps; rates then fall linearly to zero."""

JUDGED = 32
"""Held-out windows evaluated at a time."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A text, and the size of training batches and held-out data.

    Attributes:
      name: the name of the text.
      folder: the folder with its file.
      batch: windows per step.
      context: characters per window.
      held_out: the number of held-out windows.
    """

    name: str
    folder: Path | None
    batch: int
    context: int
    held_out: int

    def text(self) -> Text:
        """Return the text, loaded once."""
        return load_text(self.name, self.folder)

    def judged(self) -> tuple[Any, Any]:
        """Return inputs and targets of the held-out windows, in equal parts."""
        rest = self.text().validation
        starts = np.linspace(0, len(rest) - self.context - 1, self.held_out).astype(np.int32)
        parts = max(1, self.held_out // JUDGED)
        x, y = windows(rest, starts, self.context)
        return x.reshape(parts, -1, self.context), y.reshape(parts, -1, self.context)


def schedule(step: Any, steps: Any) -> Any:
    """Return the fraction of the peak rate at a step: linear warm-up, then linear decay to zero."""
    done = (step + 1) / steps
    return jnp.minimum(done / WARM, (1 - step / steps) / (1 - WARM))


@functools.lru_cache(maxsize=4)
def _chunk(program: str, size: Size, context: int) -> Any:
    @jax.jit
    def chunk(carry: Any, knobs: Knobs, steps: Any, train: Any, order: Any) -> Any:
        def part(step: Any) -> Any:
            return schedule(step, steps)

        hidden = optimizer(program, knobs, part)
        adam = optax.scale_by_adam(0.9, 0.95)
        factor = branch_factor(program, size, knobs.factor)

        def value(weights: Any, x: Any, y: Any) -> Any:
            return loss_of(with_factor(weights, factor), x, y)

        def step(carry: Any, starts: Any) -> Any:
            weights, own, rest, k = carry
            x, y = windows(train, starts, context)
            loss, grads = jax.value_and_grad(value)(weights, x, y)
            matrices, others = weights["matrices"], _others(weights)
            moves, own = hidden.update(grads["matrices"], own, matrices)
            more: Any
            more, rest = adam.update(_others(grads), rest, others)
            rates = {"embedding": knobs.rest_rate, "head": knobs.rest_rate}
            more = {
                name: jax.tree.map(
                    lambda u, r=rates.get(name, knobs.gain_rate): -r * part(k) * u, update
                )
                for name, update in more.items()
            }
            weights: Any = optax.apply_updates(
                {**others, "matrices": matrices}, {**more, "matrices": moves}
            )
            return (weights, own, rest, k + 1), loss

        return jax.lax.scan(step, carry, order)

    return chunk


def _others(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in tree.items() if name != "matrices"}


def with_factor(weights: dict[str, Any], factor: Any) -> dict[str, Any]:
    """Multiply the gains of the branch ends by a factor."""
    gains = {
        role: factor * gain if role in BRANCH_ENDS else gain
        for role, gain in weights["gains"].items()
    }
    return {**weights, "gains": gains}


def train(
    program: str, size: Size, task: Task, steps: int, seed: int, knobs: Knobs
) -> tuple[dict[str, Any], np.ndarray]:
    """Return the trained weights, with the branch factor in the gains, and the loss of each batch
    before its update."""
    weights = size.start(jax.random.key(seed))
    weights = {**weights, "matrices": first_matrices(program, size, weights["matrices"])}
    hidden = optimizer(program, knobs, float)
    own = hidden.init(weights["matrices"])
    rest = optax.scale_by_adam(0.9, 0.95).init(_others(weights))
    carry: Any = (weights, own, rest, jnp.int32(0))
    tokens = jnp.asarray(task.text().train)
    order = batches(seed, len(tokens) - task.context, steps, task.batch)
    numbers: Any = map(jnp.float32, knobs)
    traced = Knobs(*numbers)
    chunk = _chunk(program, size, task.context)
    losses = []
    for first in range(0, steps, CHUNK):
        starts = jnp.asarray(order[first : first + CHUNK])
        carry, found = chunk(carry, traced, jnp.float32(steps), tokens, starts)
        losses.append(np.asarray(found, np.float64))
    factor = branch_factor(program, size, knobs.factor)
    return with_factor(carry[0], factor), np.concatenate(losses)


def held_out_loss(weights: dict[str, Any], task: Task) -> float:
    """Return the mean cross-entropy of the held-out windows."""
    return float(_judge()(weights, *task.judged()))


@functools.cache
def _judge() -> Any:
    @jax.jit
    def judge(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jax.lax.map(lambda part: loss_of(weights, *part), (x, y)))

    return judge


@functools.cache
def _inside() -> Any:
    @jax.jit
    def inside(weights: Any, x: Any) -> Any:
        def one(tokens: Any) -> Any:
            _, found = scores_of(weights, tokens)
            return found.kurtosis, jnp.mean(found.hidden > 0, axis=1)

        kurtosis, alive = jax.lax.map(one, x)
        return kurtosis.mean(), alive.mean(axis=0)

    return inside


def measure(weights: dict[str, Any], task: Task) -> dict[str, float]:
    """Return the losses after rounding the hidden matrices, the kurtosis, and the shares of idle
    (`dead`, `rare`) neurons."""
    found = {}
    for name, rounded in ROUNDINGS.items():
        matrices = jax.tree.map(jax.jit(rounded), weights["matrices"])
        found[name] = held_out_loss({**weights, "matrices": matrices}, task)
    kurtosis, alive = _inside()(weights, task.judged()[0])
    found["kurtosis"] = float(kurtosis)
    found["dead"] = float(jnp.mean(alive == 0))
    found["rare"] = float(jnp.mean(alive < 1e-3))
    return found
