"""Cautious updates: no entry moves against its own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arrays import expand_trailing, frobenius_norm, nonzero_or_one, upcast
from manifoldmuon._internal.powers_of_two import normalize
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._leaves import LikePoint, batched, pair_up
from manifoldmuon.optim._tangent import tangent_part


@checked()
def cautious(
    base: optax.GradientTransformation, geometry: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Keeps of an update what agrees in sign with the gradient, entry by entry.

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

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: on use; see `resolve`.
    """
    base = optax.with_extra_args_support(base)

    def update_fn(updates, state, params=None, **extra_args):
        pulls = pair_up(geometry, updates, params, "cautious").leaves
        steps, state = base.update(updates, state, params, **extra_args)
        paired = pair_up(geometry, steps, params, "cautious")
        grads = {leaf.place: leaf.update for leaf in pulls}
        arguments = [
            (LikePoint(leaf.param), LikePoint(leaf.update), LikePoint(grads[leaf.place]))
            for leaf in paired.leaves
        ]
        entries = [leaf.entry for leaf in paired.leaves]
        return paired.filled(batched(_agreeing, entries, arguments, stack=False)), state

    return optax.GradientTransformationExtraArgs(base.init, update_fn)


def _agreeing(
    manifold: Manifold, point: jax.Array, update: jax.Array, grad: jax.Array
) -> LikePoint:
    vector, ndim = upcast(update), manifold.ndim
    # Signs, not the product, which may be too small; and a NaN is kept, for it must stay visible.
    agree = ~(jnp.sign(vector) * jnp.sign(upcast(grad)) <= 0)
    share = expand_trailing(jnp.mean(agree, axis=tuple(range(-ndim, 0)), dtype=vector.dtype), ndim)
    kept = jnp.where(agree, vector, 0) / nonzero_or_one(share)
    if manifold.constrained:
        length = expand_trailing(frobenius_norm(vector, ndim), ndim)
        kept = length * normalize(tangent_part(manifold, point, kept)[0], ndim)
    return LikePoint(kept.astype(point.dtype))
