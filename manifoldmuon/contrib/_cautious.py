"""Cautious updates: no entry moves against its own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import check_arguments
from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one, upcast
from manifoldmuon._internal.powers_of_two import normalize
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim import Geometry, map_leaves, project_tangent


@check_arguments()
def cautious(
    base: optax.GradientTransformation, geometry: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Keep of an update what agrees in sign with the gradient, entry by entry.

    `u <- u * [u * g > 0] / mean([u * g > 0])`, the mean over the entries of one weight, one point
    of the manifold (Liang et al., arXiv:2411.16085, algorithm 1, where the mean has a small number
    added). Momentum then never climbs, to first order.

    On a constrained manifold what is kept is not tangent: its tangent part is taken, at the length
    of the update, and signs agree as far as that leaves them.

    Args:
      base: what makes the updates. It must ascend, as for `normalize`:
        `chain(optax.trace(0.95), scale_by_steepest(geometry))`, `optax.scale_by_adam()`.
      geometry: which manifold, and so which points, each parameter has; see `resolve`.

    Returns:
      A transformation with the state of the base, and updates in the parameters' dtypes. `update`
      needs `params`. Where no sign agrees the update is zero; a NaN stays in its leaf.

    Examples:
      >>> geometry = mm.manifolds.Euclidean()
      >>> ascent = mm.optim.chain(optax.trace(0.95), mm.optim.scale_by_steepest(geometry))
      >>> tx = optax.chain(cautious(ascent, geometry), optax.scale_by_learning_rate(0.1))
    """
    base, tangent = optax.with_extra_args_support(base), project_tangent(geometry)

    def update_fn(updates, state, params=None, **extra_args):
        signs, _ = map_leaves(_sign, geometry, updates, params, name="cautious", stack=False)
        steps, state = base.update(updates, state, params, **extra_args)
        kept, _ = map_leaves(_keep, geometry, steps, params, signs, name="cautious", stack=False)
        kept, _ = tangent.update(kept, optax.EmptyState(), params)
        kept, _ = map_leaves(
            lengthen, geometry, kept, params, steps, select=lambda m: m.constrained, stack=False
        )
        return kept, state

    return optax.GradientTransformationExtraArgs(base.init, update_fn)


def _sign(manifold: Manifold, point: jax.Array, grad: jax.Array) -> jax.Array:
    return jnp.sign(upcast(grad))


def _keep(manifold: Manifold, point: jax.Array, update: jax.Array, sign: jax.Array) -> jax.Array:
    vector, ndim = upcast(update), manifold.ndim
    # Signs, not the product, which may be too small; and a NaN is kept, for it must stay visible.
    agree = ~(jnp.sign(vector) * sign <= 0)
    share = expand_trailing(jnp.mean(agree, axis=tuple(range(-ndim, 0)), dtype=vector.dtype), ndim)
    return jnp.where(agree, vector, 0) / nonzero_or_one(share)


def lengthen(manifold: Manifold, point: jax.Array, kept: jax.Array, update: jax.Array) -> jax.Array:
    """Return what is kept of an update, at the length of the whole, in the point's dtype."""
    length = expand_trailing(frobenius_norm(upcast(update), manifold.ndim), manifold.ndim)
    return (length * normalize(kept, manifold.ndim)).astype(point.dtype)
