"""Static shares of the learning rate per leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from manifoldmuon._internal.trees.matching import Matched, match
from manifoldmuon._internal.trees.paths import Spec, if_complex
from manifoldmuon._internal.trees.transformations import gradient_transformation

Budgets = Spec[ArrayLike]
"""Numbers or arrays: a prefix tree, a `by_path` object, or a function of path and leaf."""


def scale_by_budget(budgets: Budgets) -> optax.GradientTransformationExtraArgs:
    """Multiply each update by its leaf's share of the learning rate.

    For a fixed architecture the duality map of the modular norm (arXiv:2405.14813) is each leaf's
    own duality map times a number: this transformation multiplies by the numbers.

    Args:
      budgets: finite, non-negative numbers (not checked in JAX arrays): a single number, a prefix
        tree over the parameters (compared by path), the result of `by_path`, or a function of JAX
        key path and leaf. For different budgets in a stack, give an array that broadcasts against
        the leaf: shape `(n, 1, 1)` for a stack of n matrices.

    Returns:
      A transformation without state; shapes and dtypes of the updates do not change.

    Examples:
      >>> tx = scale_by_budget({"body": 1.0, "head": 0.5})
      >>> updates = {"body": jnp.ones(2), "head": jnp.ones(2)}
      >>> tx.update(updates, tx.init(updates))[0]["head"].tolist()
      [0.5, 0.5]
    """

    def init_fn(params: Any) -> optax.EmptyState:
        find_budgets(budgets, params)
        return optax.EmptyState()

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        matched = find_budgets(budgets, updates)
        leaves = matched.leaves(updates)
        for i in matched.real:
            x = jnp.asarray(leaves[i])
            leaves[i] = x * jnp.asarray(matched.values[i], x.dtype)
        return jax.tree.unflatten(matched.treedef, leaves), state

    return gradient_transformation(update_fn, init_fn)


def find_budgets(budgets: Budgets, tree: Any) -> Matched:
    """Return `match` for budgets, with checked values; see `scale_by_budget`."""
    return match(budgets, tree, _check_budget, "budgets")


def _check_budget(path: str, budget: Any, leaf: jax.ShapeDtypeStruct) -> None:
    """Raise unless a budget is a number or broadcasts against its floating-point leaf."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"{path!r} has dtype {leaf.dtype}, not real floating point. Take it out"
            f" with optax.masked or optax.partition{if_complex(leaf.dtype)}."
        )
    dtype = getattr(budget, "dtype", None)
    if isinstance(budget, bool) or (dtype is None and not isinstance(budget, int | float)):
        raise TypeError(f"the budget of {path!r} is {budget!r}, not a number.")
    if dtype is not None and not any(jnp.issubdtype(dtype, x) for x in (jnp.floating, jnp.integer)):
        raise TypeError(f"the budget of {path!r} has dtype {dtype}, not real numbers.")
    if not _broadcasts(jnp.shape(budget), leaf.shape):
        raise ValueError(
            f"the budget of {path!r} has shape {jnp.shape(budget)}, which does not broadcast"
            f" against the shape {leaf.shape}; give a number, or for a stack an array of shape"
            " (copies, 1, 1)."
        )
    # `optax.inject_hyperparams` turns numbers into traced arrays of unknown value.
    if not isinstance(budget, jax.Array):
        values = np.asarray(budget)
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise ValueError(f"the budget of {path!r} is {budget}; it must be finite and >= 0.")


def _broadcasts(budget: tuple[int, ...], leaf: tuple[int, ...]) -> bool:
    """Return whether an array of the first shape broadcasts against the second, not vice versa."""
    tail = leaf[len(leaf) - len(budget) :]
    return len(budget) <= len(leaf) and all(b in (1, n) for b, n in zip(budget, tail, strict=True))
