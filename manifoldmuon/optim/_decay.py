"""Weight decay of what no manifold bounds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arrays import upcast
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._arguments import checked, number
from manifoldmuon.optim._geometry import Geometry, Places, find_manifolds, manifold_of
from manifoldmuon.optim._leaves import LikePoint, batched, is_placeholder, pair_up

Decay = optax.ScalarOrSchedule | optax.GradientTransformation
"""A rate of weight decay, or a link that adds it, such as `add_cautious_weight_decay(...)`."""

_RATE = number("[0, inf)", schedule=True)


def decay_link(weight_decay: Decay | None, geometry: Geometry) -> optax.GradientTransformation:
    """Weight decay of the unconstrained leaves; None decays nothing, and a link is that link."""
    if weight_decay is None:
        return optax.identity()
    if isinstance(weight_decay, optax.GradientTransformation):
        return weight_decay

    def mask(tree: Any) -> Any:
        places = find_manifolds(geometry, tree)
        marks = {place: not manifold_of(places.values[place]).constrained for place in places.real}
        return places.fill(tree, marks)

    return optax.add_decayed_weights(weight_decay, mask=mask)


@checked(weight_decay=_RATE)
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
    decay = decay_link(weight_decay, geometry)

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


@checked(weight_decay=_RATE)
def add_decay_towards(
    weight_decay: optax.ScalarOrSchedule, geometry: Geometry, sets: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Weight decay towards the nearest point of a set, in place of zero: a soft constraint.

    `u <- u + weight_decay * (w - project(w))`, with the projection of the leaf's entry in `sets`.
    It goes where weight decay goes, before the learning rate: every step shortens the distance from
    the set by the share `learning_rate * weight_decay`. Steps stay those of flat space, and the
    set is where the weights would come to rest without gradients. Every step projects: onto
    `Stiefel` that is a converged msign, which takes more time than the step of `muon`.

    Args:
      weight_decay: a number, 0 or more, or an Optax schedule of such.
      geometry: which manifold each parameter lives on; see `resolve`.
      sets: towards which set each parameter decays, likewise; `Euclidean()` for none. Its layouts
        need not be those of `geometry`.

    Returns:
      A transformation with the state of `optax.add_decayed_weights` and updates in the parameters'
      dtypes. `update` needs `params`. A weight without a nearest point (zero, for a sphere) goes
      towards the one that `Manifold.project` chooses.

    Raises:
      TypeError: on use; see `resolve`.
      ValueError: a negative number; on use, for a leaf that `geometry` constrains and that has a
        set: its retraction holds it already. See `resolve`.

    Example:
      `muon(0.02, geometry, weight_decay=add_decay_towards(0.1, geometry, Stiefel()))`
    """
    decay = optax.add_decayed_weights(weight_decay)

    def init_fn(params: Any) -> Any:
        if not is_placeholder(params):
            _find_sets(geometry, sets, params)
        return decay.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        paired = pair_up(geometry, updates, params, "add_decay_towards")
        targets = _find_sets(geometry, sets, params).values
        pulled = [x for x in paired.leaves if manifold_of(targets[x.place]).constrained]
        points = [(LikePoint(leaf.param),) for leaf in pulled]
        gaps = batched(_gap, [targets[leaf.place] for leaf in pulled], points, divide=True)
        by_place = {leaf.place: gap for leaf, gap in zip(pulled, gaps, strict=True)}
        zeros = [by_place.get(x.place, jnp.zeros_like(x.param)) for x in paired.leaves]
        decayed, state = decay.update(paired.updates, state, paired.filled(zeros))
        found = paired.places.leaves(decayed)
        cast = [found[leaf.place].astype(leaf.param.dtype) for leaf in paired.leaves]
        return paired.filled(cast), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _find_sets(geometry: Geometry, sets: Geometry, params: Any) -> Places:
    manifolds, targets = find_manifolds(geometry, params), find_manifolds(sets, params)
    both = [
        targets.paths[place]
        for place in targets.real
        if manifold_of(manifolds.values[place]).constrained
        and manifold_of(targets.values[place]).constrained
    ]
    if both:
        raise ValueError(
            f"add_decay_towards: {both} lie on constrained manifolds, and their retraction holds"
            " them there; decay them towards Euclidean(), which is nothing, or let their steps be"
            " Euclidean"
        )
    return targets


def _gap(manifold: Manifold, point: jax.Array) -> LikePoint:
    start = upcast(point)
    return LikePoint((start - manifold.project(start)).astype(point.dtype))
