"""The duality map of a whole tree, for any combination of the layers' norms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manifoldmuon.linalg import prescale, times_power_of_two
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._combination import Combination, Max
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._grouping import together
from manifoldmuon.optim._steepest import scale_by_steepest
from manifoldmuon.optim._updates import pair_up


def scale_by_duality(
    geometry: Geometry, budgets: Budgets = 1.0, combination: Combination = Max()
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by the steepest step of norm 1 in the norm of the whole tree.

    That norm is `combine_k ||w_k|| / b_k` over the layers. A layer is one point of its manifold:
    each copy in a stack counts by itself, and so does each tap of a kernel whose taps are the
    points (`Stiefel`; under `Euclidean(ConvRMSToRMS())` the kernel is one point). The dual norm
    of a layer is `<gradient, steepest direction>`, on curved manifolds over tangent directions.
    With `Max()` this is `scale_by_steepest` followed by `scale_by_budget`.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.
      budgets: the `b_k`; see `scale_by_budget`. A layer of budget 0 is frozen.
      combination: how norms combine: `Max()`, `Sum()` or `RootSumSquares()`.

    Returns:
      A transformation with the state and the dtypes of `scale_by_steepest`; `update` needs
      `params`. Zeros give zeros. Where layers depend on one another, so do their NaNs.

    Raises:
      TypeError: on use; see `resolve` and `scale_by_budget`.
      ValueError: on use; see `resolve` and `scale_by_budget`.
    """
    steepest, shares = scale_by_steepest(geometry), scale_by_budget(budgets)

    def update_fn(updates, state, params=None, **extra_args):
        directions, state = steepest.update(updates, state, params, **extra_args)
        directions, _ = shares.update(directions, optax.EmptyState())
        _, _, grads = pair_up(geometry, updates, params, "scale_by_duality")
        layout, outgoing, steps = pair_up(geometry, directions, params, "scale_by_duality")
        if not steps:
            return directions, state
        manifolds = [step.manifold for step in steps]
        problems = [(s.update, g.update) for s, g in zip(steps, grads, strict=True)]
        gains = [gain for _, gain in together(_gain, manifolds, problems)]
        given = _combine(combination, gains)
        problems = [(s.update, c) for s, c in zip(steps, given, strict=True)]
        for step, (moved, _) in zip(steps, together(_multiply, manifolds, problems), strict=True):
            outgoing[step.index] = moved
        return layout.rebuild(outgoing), state

    return optax.GradientTransformationExtraArgs(steepest.init, update_fn)


def _gain(manifold: Manifold, step: jax.Array, grad: jax.Array) -> tuple[jax.Array, Any]:
    """`<grad, step>` of every point, as numbers of moderate size and one power of two."""
    scaled, exponent = prescale(grad, grad.ndim)
    return step, (jnp.maximum(manifold.inner(scaled, step), 0), exponent)


def _combine(combination: Combination, gains: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """What every point is given, from the gains of all points on one scale."""
    scale = [jnp.where(jnp.any(size > 0), power, -(2**20)) for size, power in gains]
    largest = jnp.max(jnp.stack(scale))
    # Not above 0: the exponent of a leaf of zeros means nothing.
    sizes = [times_power_of_two(d, jnp.minimum(power - largest, 0)) for d, power in gains]
    given = combination.lmo(jnp.concatenate([size.ravel() for size in sizes]))
    ends = np.cumsum([size.size for size in sizes])[:-1]
    parts = jnp.split(given, ends)
    return [part.reshape(size.shape) for part, size in zip(parts, sizes, strict=True)]


def _multiply(manifold: Manifold, step: jax.Array, given: jax.Array) -> tuple[jax.Array, tuple[()]]:
    return step * manifold.spread(given, step.shape).astype(step.dtype), ()
