"""Weight decay of what no manifold bounds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from manifoldmuon.optim._geometry import Geometry, find_manifolds, manifold_of
from manifoldmuon.optim._leaves import pair_up


def add_weight_decay(
    weight_decay: optax.ScalarOrSchedule, geometry: Geometry
) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` of the unconstrained leaves."""

    def mask(tree: Any) -> Any:
        places = find_manifolds(geometry, tree)
        marks = {place: not manifold_of(places.values[place]).constrained for place in places.real}
        return places.fill(tree, marks)

    return optax.add_decayed_weights(weight_decay, mask=mask)


def add_cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule, geometry: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Weight decay only where it pulls the way the update goes already.

    `u <- u + weight_decay * [u * w >= 0] * w`, entry by entry, where `u` ascends: the decay never
    works against a step (Chen et al., arXiv:2510.12402, algorithm 1). It goes where weight decay
    goes, before the learning rate, which turns the sign around and multiplies the decay.
    Constrained leaves pass through: their manifold bounds them.

    Args:
      weight_decay: a number, 0 or more, or an Optax schedule of such.
      geometry: which manifold each parameter lives on; see `resolve`.

    Returns:
      A transformation with the state of `optax.add_decayed_weights` and updates in the parameters'
      dtypes. `update` needs `params`. A zero update is no obstacle; where the update is NaN it
      stays NaN.

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: a negative number; on use, see `resolve`.

    Example:
      `muon(0.02, geometry, weight_decay=add_cautious_weight_decay(0.1, geometry))`
    """
    if isinstance(weight_decay, int | float) and not weight_decay >= 0:
        raise ValueError(
            f"add_cautious_weight_decay: weight_decay must be 0 or more; got {weight_decay!r}"
        )
    decay = add_weight_decay(weight_decay, geometry)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        paired = pair_up(geometry, updates, params, "add_cautious_weight_decay")
        decayed, state = decay.update(updates, state, params)
        decayed = paired.places.leaves(decayed)
        found = []
        for leaf in paired.leaves:
            # Signs, not the product, which may be too small to be told from zero.
            agree = jnp.sign(leaf.update) * jnp.sign(leaf.param) >= 0
            after = jnp.where(agree, decayed[leaf.place], leaf.update)
            found.append(after.astype(leaf.param.dtype))
        return paired.filled(found), state

    return optax.GradientTransformationExtraArgs(decay.init, update_fn)
