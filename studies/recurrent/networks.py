"""Recurrent networks and their optimizers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from manifoldmuon.manifolds import Orthogonal, Stiefel
from manifoldmuon.manifolds.retractions import Cayley
from manifoldmuon.optim import by_path, manifold_muon
from studies.recurrent.tasks import Batch, Task

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


# --- Parameters of the recurrent matrix ----------------------------------------------------------
# A pair of functions: from the angles of its planes (gates, width / 2) to parameters, and from
# parameters to weights.


def _planes(values: Any) -> Array:
    width = 2 * len(values)
    return jnp.zeros((width, width)).at[::2, 1::2].set(jnp.diag(values))


def _skew(matrix: Any) -> Any:
    upper = jnp.triu(matrix, 1)
    return upper - upper.T


def _rotations(angles: Any) -> Params:
    turns = [jax.scipy.linalg.expm(_skew(_planes(own))) for own in angles]
    return {"recurrent": jnp.concatenate(turns, axis=1)}


def _angles(angles: Any) -> Params:
    return {"recurrent": _planes(angles[0])}


def _exponential(params: Params) -> Params:
    """Replace A by exp(A - A^T), where A is above the diagonal (arXiv:1901.08428)."""
    return params | {"recurrent": jax.scipy.linalg.expm(_skew(params["recurrent"]))}


def _half_tangents(angles: Any) -> Params:
    """Tell rotations beyond a quarter turn by a sign -1 and the rest of the angle."""
    beyond = jnp.abs(angles[0]) > np.pi / 2
    rest = angles[0] - jnp.where(beyond, np.pi * jnp.sign(angles[0]), 0.0)
    signs = jnp.repeat(jnp.where(beyond, -1.0, 1.0), 2)
    return {"recurrent": _planes(jnp.tan(rest / 2)), "signs": signs}


def _cayley(params: Params) -> Params:
    """Replace A by the Cayley map of A - A^T times fixed signs (arXiv:1707.09520)."""
    skew, eye = _skew(params["recurrent"]), jnp.eye(len(params["recurrent"]))
    signs = jax.lax.stop_gradient(params["signs"])
    return params | {"recurrent": jnp.linalg.solve(eye - skew, eye + skew) * signs}


FREE = _rotations, lambda params: params
EXPONENTIAL = _angles, _exponential
CAYLEY = _half_tangents, _cayley


# --- Methods -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """A network and its optimizer.

    Attributes:
      rates: the grid of the recurrent matrix, for constant rates.
      sets: manifolds by name of the weight; Adam trains weights without.
      cell: the step of the network.
      gates: matrices side by side in the recurrent matrix. With more than 1, Adam has one rate.
      parameters: of the recurrent matrix, `FREE`, `EXPONENTIAL` or `CAYLEY`.
    """

    rates: tuple[float, ...]
    sets: Mapping[str, Stiefel] = dataclasses.field(default_factory=dict)
    cell: Callable[[Params, Any, Any], Any] = simple
    gates: int = 1
    parameters: tuple[Callable[[Any], Params], Callable[[Params], Params]] = FREE

    def optimizer(self, rate: Any, rest: Any, uses: int) -> optax.GradientTransformation:
        """Return manifold Muon, with the budget of so many uses, or Adam, with a rate for the
        recurrent matrix and another for the rest."""
        if self.sets:
            return manifold_muon(
                rate, by_path({**self.sets, "**": None}), MOMENTUM, rest=optax.adam(rest),
                budgets=1 / uses, track_gap=False,
            )  # fmt: skip
        if self.gates > 1:
            return optax.adam(rate)

        def labels(params: Params) -> dict[str, str]:
            return {name: "recurrent" if name == "recurrent" else "rest" for name in params}

        return optax.partition({"recurrent": optax.adam(rate), "rest": optax.adam(rest)}, labels)

    def init(self, task: Task, width: int, key: Any) -> Params:
        """Draw the weights; the recurrent matrix rotates planes by uniform angles of at most
        `task.angle` (arXiv:1602.06662)."""
        keys = jax.random.split(key, 3)
        params = {
            "input": jax.random.normal(keys[1], (task.features, self.gates * width)) / width**0.5,
            "bias": jnp.zeros(self.gates * width),
            "output": jax.random.normal(keys[2], (width, task.classes)) / width**0.5,
            "offset": jnp.zeros(task.classes),
        }
        angles = jax.random.uniform(keys[0], (self.gates, width // 2), minval=-1) * task.angle
        if "input" in self.sets:
            params["input"] = self.sets["input"].project(params["input"])
        return params | self.parameters[0](angles)

    def loss(self, task: Task, params: Params, batch: Batch) -> tuple[Any, Any]:
        """Return the mean loss over all outputs, and the share of right ones."""
        weights = self.parameters[1](params)

        def step(state: Any, driven: Any) -> Any:
            state = self.cell(weights, state, driven)
            return state, state

        inputs, labels = batch
        start = jnp.zeros((inputs.shape[1], len(weights["output"])))
        _, states = jax.lax.scan(step, start, inputs @ weights["input"])
        logits = states[-task.outputs :] @ weights["output"] + weights["offset"]
        losses, right = task.judge(logits, labels)
        return losses.mean(), right.mean()


ORTHOGONAL = Orthogonal().for_training()
OURS = 0.05, 0.1, 0.2, 0.4, 0.8

METHODS: dict[str, Method] = {
    "Orthogonal": Method(OURS, {"recurrent": ORTHOGONAL}),
    "Adam": Method((3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "expRNN": Method((1e-4, 3e-4, 1e-3, 3e-3, 1e-2), parameters=EXPONENTIAL),
    "scoRNN": Method((1e-4, 3e-4, 1e-3, 3e-3, 1e-2), parameters=CAYLEY),
    "GRU": Method((3e-4, 1e-3, 3e-3, 1e-2, 3e-2), cell=gated, gates=3),
    "Stiefel input": Method(OURS, {"recurrent": ORTHOGONAL, "input": Stiefel().for_training()}),
    "Cayley retraction": Method(
        OURS, {"recurrent": dataclasses.replace(ORTHOGONAL, retraction=Cayley())}
    ),
}
"""The rates of manifold Muon are times 1 / uses, those of `GRU` are for all weights."""
