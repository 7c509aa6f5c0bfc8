"""Static shares of the learning rate, one per leaf."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.optim._geometry import lay_out
from manifoldmuon.optim._paths import is_hole

Budgets = Any
"""A prefix tree of numbers, a `by_path` object, or a function `(path, leaf) -> number`."""


def scale_by_budget(budgets: Budgets) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by its leaf's share of the learning rate.

    For a fixed architecture the modular norm (arXiv:2405.14813) is one number per leaf times
    the leaf's own duality map: this link applies the numbers.

    Args:
      budgets: finite, non-negative numbers: one for all, a prefix tree over the parameters
        (compared by path), what `by_path` returns, or a function of JAX key path and leaf.

    Returns:
      A transformation without state; shapes and dtypes of the updates stay.

    Raises:
      TypeError: on use, for a budget that is not a number or an update that is not floating point.
      ValueError: on use, for a negative or infinite budget, an update without a budget, or a
        budget without an update. Every message names the path.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        layout = lay_out(budgets, updates, lambda node: False)
        scaled = [
            leaf if is_hole(leaf) else _scaled(path, leaf, budget)
            for path, leaf, budget in zip(layout.paths, layout.leaves, layout.values, strict=True)
        ]
        return layout.rebuild(scaled), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def _scaled(path: str, update: jax.Array, budget: Any) -> jax.Array:
    update = jnp.asarray(update)
    if not jnp.issubdtype(update.dtype, jnp.floating):
        raise TypeError(f"the update of {path!r} has dtype {update.dtype}, not floating point.")
    traced = isinstance(budget, jax.Array)  # optax.inject_hyperparams makes numbers into arrays
    if not traced and (isinstance(budget, bool) or not isinstance(budget, (int, float))):
        raise TypeError(f"the budget of {path!r} is {budget!r}, not a number.")
    if not traced and not (math.isfinite(budget) and budget >= 0):
        raise ValueError(f"the budget of {path!r} is {budget}; it must be finite and >= 0.")
    return update * jnp.asarray(budget, update.dtype)
