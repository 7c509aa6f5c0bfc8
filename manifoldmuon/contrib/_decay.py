"""Weight decay that never works against a step, and weight decay towards a set."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import check_arguments, number
from manifoldmuon._internal.arrays import upcast
from manifoldmuon._internal.links import link
from manifoldmuon._internal.paths import is_hole, path_string
from manifoldmuon.contrib._rule import cast_like
from manifoldmuon.manifolds import LaidOut, Manifold
from manifoldmuon.optim import Geometry, map_leaves, resolve

_CHECK = check_arguments(weight_decay=number("[0, inf)", schedule=True))


@_CHECK
def add_cautious_weight_decay(
    weight_decay: optax.ScalarOrSchedule, geometry: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Add weight decay only where it agrees with the update.

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
      ValueError: a negative number.

    Examples:
      >>> geometry = mm.manifolds.Euclidean(mm.norms.RMSToRMS())
      >>> decay = add_cautious_weight_decay(0.1, geometry)
      >>> tx = mm.optim.muon(0.02, geometry, weight_decay=decay)
    """
    decay = optax.add_decayed_weights(weight_decay)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        name = "add_cautious_weight_decay"
        pulls, _ = map_leaves(_agreeing, geometry, updates, params, name=name, stack=False)
        updates, state = decay.update(updates, state, pulls)
        return cast_like(updates, params), state

    return optax.GradientTransformationExtraArgs(decay.init, update_fn)


def _agreeing(manifold: Manifold, point: jax.Array, update: jax.Array) -> jax.Array:
    """Return the entries of a weight that a step brings closer to 0, and 0 for the others."""
    if manifold.constrained:
        return jnp.zeros_like(point)
    # Signs, not the product, which may underflow.
    return jnp.where(jnp.sign(update) * jnp.sign(point) >= 0, point, 0)


@_CHECK
def add_decay_towards(
    weight_decay: optax.ScalarOrSchedule, geometry: Geometry, sets: Geometry
) -> optax.GradientTransformationExtraArgs:
    """Add weight decay towards the nearest point of a set instead of zero: a soft constraint.

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
      ValueError: a negative number; on use, for a leaf that `geometry` constrains and that has a
        set: its retraction holds it already.

    Examples:
      >>> geometry = mm.manifolds.Euclidean(mm.norms.RMSToRMS())
      >>> decay = add_decay_towards(0.1, geometry, mm.manifolds.Stiefel())
      >>> tx = mm.optim.muon(0.02, geometry, weight_decay=decay)
    """
    decay = optax.add_decayed_weights(weight_decay)

    def init_fn(params: Any) -> Any:
        _check_sets(geometry, sets, params)
        return decay.init(params)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        options: Any = {"name": "add_decay_towards", "select": lambda m: m.constrained}
        _check_sets(geometry, sets, params)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        pulls, _ = map_leaves(_gap, sets, zeros, params, divide=True, **options)
        updates, state = decay.update(updates, state, pulls)
        return cast_like(updates, params), state

    return link(update_fn, init_fn, decay.init)


def _check_sets(geometry: Geometry, sets: Geometry, params: Any) -> None:
    both = []

    def check(path: Any, target: Any, entry: Any, leaf: Any) -> None:
        if target is None and not is_hole(leaf):
            raise TypeError(
                f"add_decay_towards: the set of {path_string(path)!r} is None; give Euclidean() to"
                " what is not pulled anywhere"
            )
        if _is_constrained(entry) and _is_constrained(target):
            both.append(path_string(path))

    trees = resolve(sets, params), resolve(geometry, params), params
    jax.tree.map_with_path(check, *trees, is_leaf=is_hole)
    if both:
        raise ValueError(
            f"add_decay_towards: {both} lie on constrained manifolds, and their retraction keeps"
            " them there; give them Euclidean() in `sets`, or let their steps be Euclidean"
        )


def _is_constrained(entry: Any) -> bool:
    return getattr(entry.manifold if isinstance(entry, LaidOut) else entry, "constrained", False)


def _gap(manifold: Manifold, point: jax.Array, _: jax.Array) -> jax.Array:
    start = upcast(point)
    return (start - manifold.project(start)).astype(point.dtype)
