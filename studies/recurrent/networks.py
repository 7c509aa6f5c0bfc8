"""Recurrent networks and their optimizers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from manifoldmuon.manifolds import Orthogonal
from manifoldmuon.optim import by_path, hybrid, manifold_muon
from studies.recurrent.tasks import Batch, Task

GEOMETRY = by_path({"recurrent": Orthogonal().for_training(), "**": None})
MOMENTUM = 0.9

Params = dict[str, Array]


def simple(params: Params, state: Any, driven: Any) -> Any:
    """Take a step with modReLU (arXiv:1511.06464)."""
    before = state @ params["recurrent"] + driven
    return jnp.sign(before) * jax.nn.relu(jnp.abs(before) + params["bias"])


def gated(params: Params, state: Any, driven: Any) -> Any:
    """Take a step of a gated recurrent unit (arXiv:1406.1078)."""
    reset, update, new = jnp.split(driven + params["bias"], 3, axis=-1)
    for_reset, for_update, for_new = jnp.split(state @ params["recurrent"], 3, axis=-1)
    kept = jax.nn.sigmoid(update + for_update)
    return kept * state + (1 - kept) * jnp.tanh(new + jax.nn.sigmoid(reset + for_reset) * for_new)


def exponential(params: Params) -> Params:
    """Replace A by exp(A - A^T), where A is above the diagonal (arXiv:1901.08428)."""
    upper = jnp.triu(params["recurrent"], 1)
    return params | {"recurrent": jax.scipy.linalg.expm(upper - upper.T)}


def constrained(rate: Any, rest: Any, uses: int) -> optax.GradientTransformation:
    """Return manifold Muon for the recurrent matrix, with the budget of its uses, and Adam."""
    ours = manifold_muon(rate, GEOMETRY, MOMENTUM, budgets=1 / uses, track_gap=False)
    return hybrid(ours, GEOMETRY, optax.adam(rest))


def adam(rate: Any, rest: Any, uses: int) -> optax.GradientTransformation:
    """Return Adam, with a rate for the recurrent matrix and another for the rest."""

    def labels(params: Params) -> dict[str, str]:
        return {name: "recurrent" if name == "recurrent" else "rest" for name in params}

    return optax.partition({"recurrent": optax.adam(rate), "rest": optax.adam(rest)}, labels)


@dataclasses.dataclass(frozen=True)
class Method:
    """A network and its optimizer.

    Attributes:
      optimizer: maps the rate of the recurrent matrix, that of the rest, and the number of uses.
      rates: the grid of the recurrent matrix, for constant rates.
      cell: the step of the network.
      gates: matrices side by side in the recurrent matrix.
      mapped: whether the recurrent matrix is the exponential of its parameters.
    """

    optimizer: Callable[[Any, Any, int], optax.GradientTransformation]
    rates: tuple[float, ...]
    cell: Callable[[Params, Any, Any], Any] = simple
    gates: int = 1
    mapped: bool = False

    def init(self, task: Task, width: int, key: Any) -> Params:
        """Draw the weights; the recurrent matrix rotates planes by uniform angles
        (arXiv:1602.06662)."""
        keys = jax.random.split(key, 3)
        params = {
            "input": jax.random.normal(keys[1], (task.features, self.gates * width)) / width**0.5,
            "bias": jnp.zeros(self.gates * width),
            "output": jax.random.normal(keys[2], (width, task.classes)) / width**0.5,
            "offset": jnp.zeros(task.classes),
        }
        drawn = jax.random.uniform(keys[0], (self.gates, width // 2), minval=-np.pi, maxval=np.pi)
        upper = [jnp.zeros((width, width)).at[::2, 1::2].set(jnp.diag(own)) for own in drawn]
        if self.mapped:
            return params | {"recurrent": upper[0]}
        turns = [exponential({"recurrent": own})["recurrent"] for own in upper]
        return params | {"recurrent": jnp.concatenate(turns, axis=1)}

    def loss(self, task: Task, params: Params, batch: Batch) -> tuple[Any, Any]:
        """Return the mean loss and accuracy over all outputs."""
        weights = exponential(params) if self.mapped else params

        def step(state: Any, driven: Any) -> Any:
            state = self.cell(weights, state, driven)
            return state, state

        inputs, labels = batch
        start = jnp.zeros((inputs.shape[1], len(weights["output"])))
        _, states = jax.lax.scan(step, start, inputs @ weights["input"])
        logits = states[-task.outputs :] @ weights["output"] + weights["offset"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), jnp.mean(logits.argmax(-1) == labels)


METHODS: dict[str, Method] = {
    "Orthogonal": Method(constrained, (0.05, 0.1, 0.2, 0.4, 0.8)),
    "Adam": Method(adam, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "expRNN": Method(adam, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), mapped=True),
    "GRU": Method(
        lambda rate, rest, uses: optax.adam(rate), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), gated, gates=3
    ),
}
"""The rates of `Orthogonal` are times 1 / uses, those of `GRU` are for all weights."""
