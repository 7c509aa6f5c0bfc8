"""What the checks of gradient transformations share."""

from typing import Any, NamedTuple

import jax
import optax

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Case(NamedTuple):
    """A transformation under test: its `update` is compiled once and shared by the checks."""

    tx: optax.GradientTransformationExtraArgs
    params: Any
    grads: Any
    needs_params: bool


def take_step(case: Case, grads: Any, params: Any = None) -> tuple[Any, Any]:
    """Updates and state after the first step, from `case.params` or other parameters."""
    params = case.params if params is None else params
    state = case.tx.init(params)
    return case.tx.update(grads, state, params)


def punch(tree: Any, hole: Any) -> Any:
    """`tree` with its first leaf replaced by `None` or `MaskedNode`."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [hole, *leaves[1:]])
