"""The last link, from a tangent step to a step between points, and its place in a chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.linalg import upcast
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._geometry import Geometry, find_manifolds, manifold_of
from manifoldmuon.optim._leaves import LikePoint, batched, pair_up
from manifoldmuon.optim._owners import divided_alike
from manifoldmuon.optim._trees import distance_tree, init_tree


class LastLink(optax.GradientTransformationExtraArgs):
    """A transformation after which nothing may change the updates any more.

    An ordinary `optax.GradientTransformationExtraArgs`; the type lets `chain` see the mistake.
    """


def retract(geometry: Geometry) -> LastLink:
    """Emits `R_W(u) - W`, so that `optax.apply_updates` lands on the manifold.

    It must be the last link: anything that scales or adds to its updates leaves the manifold
    without a word. `manifoldmuon.optim.chain` refuses a wrong order, and `check_chain` finds it
    in any transformation, built by whatever means. Wrappers that pass an update on or suppress
    it whole (`optax.masked`, `optax.MultiSteps`, `optax.apply_if_finite`) are harmless.

    On unconstrained leaves the step passes through, cast to the parameter's dtype.

    Args:
      geometry: which manifold each parameter lives on; see `resolve`.

    Returns:
      A transformation without state. The retraction is computed in float32 or wider; the update
      has the parameter's dtype and is rounded so that `W + u`, in that dtype, is next to the
      retracted point. A zero step gives a zero update. `update` needs `params`.

    Raises:
      TypeError: on use, for parameters that are not floating point.
      ValueError: on use, where geometry, parameters and updates do not fit, naming the path.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        paired = pair_up(geometry, updates, params, "retract")
        moving = [leaf for leaf in paired.leaves if manifold_of(leaf.entry).constrained]
        marked = [(LikePoint(leaf.param), LikePoint(leaf.update)) for leaf in moving]
        steps = batched(_step, [leaf.entry for leaf in moving], marked, divide=True)
        by_place = {leaf.place: step for leaf, step in zip(moving, steps, strict=True)}
        emitted = [
            by_place.get(leaf.place, leaf.update.astype(leaf.param.dtype)) for leaf in paired.leaves
        ]
        pairs = zip(emitted, paired.leaves, strict=True)
        return paired.filled([divided_alike(u, leaf.param) for u, leaf in pairs]), state

    return LastLink(lambda params: optax.EmptyState(), update_fn)


def _step(manifold: Manifold, point: jax.Array, vector: jax.Array) -> LikePoint:
    start = upcast(point)
    return LikePoint(difference(manifold.retract(start, vector.astype(start.dtype)), point))


def difference(target: jax.Array, point: jax.Array) -> jax.Array:
    """The update `u` in the point's dtype for which the rounded `point + u` is next to `target`.

    Rounding the target first makes the difference exact wherever target and point are within a
    factor of two of one another (Sterbenz): the sum is then the best number there is.
    """
    nearest = target.astype(point.dtype)
    return (upcast(nearest) - upcast(point)).astype(point.dtype)


def chain(*links: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`optax.chain` that refuses a `retract` which is not last.

    Args:
      *links: gradient transformations, applied in order.

    Returns:
      What `optax.chain` returns. If the last link is a `retract` (or a chain ending in one), the
      result counts as one, too, when it is chained again.

    Raises:
      ValueError: if a link follows a `retract`.

    Example:
      `chain(optax.trace(0.95), scale_by_steepest(g), optax.scale_by_learning_rate(lr), retract(g))`
    """
    for position, link in enumerate(links[:-1]):
        if isinstance(link, LastLink):
            raise ValueError(
                f"link {position} of {len(links)} is a retract, but it must be last: whatever"
                " changes its updates takes the parameters off the manifold. Move the links after"
                " it (learning rate, budgets, weight decay) in front of it."
            )
    chained = optax.chain(*links)
    return LastLink(*chained) if links and isinstance(links[-1], LastLink) else chained


def check_chain(
    tx: optax.GradientTransformation,
    geometry: Geometry,
    params: Any,
    *,
    steps: int = 3,
    tolerance: float | None = None,
) -> None:
    """Checks, by taking steps, that a transformation keeps parameters on their manifolds.

    It judges what comes out, so it sees a `retract` that is missing or not last in any
    transformation. Call it once before training, with the largest learning rate: a departure
    grows with the step (about 0.3 lr for a learning rate after `retract`, lr^2 / 2 for a
    missing one) and is invisible below the tolerance. Give the inner transformation of
    `optax.MultiSteps`, and the plateau of a schedule that starts at zero.

    Args:
      tx: any gradient transformation.
      geometry: which manifold each parameter lives on; see `resolve`.
      params: parameters or `jax.ShapeDtypeStruct`; only structure, shapes and dtypes matter.
      steps: how many updates with random gradients to apply, from random points.
      tolerance: the largest allowed `Manifold.distance`; by default 16 eps sqrt(d) for the
        leaf's dtype and its longest axis d.

    Raises:
      ValueError: naming the parameters that left their manifold; or if no parameter moved, so
        that nothing was checked.
    """
    start = moving = jax.jit(lambda: init_tree(geometry, jax.random.key(0), params))()

    @jax.jit
    def step(key, params, state):
        leaves, treedef = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        grads = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        updates, state = tx.update(jax.tree.unflatten(treedef, grads), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(moving)
    for key in jax.random.split(jax.random.key(1), steps):
        moving, state = step(key, moving, state)
    moved = [jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (start, moving)), strict=True)]
    if not any(moved):
        raise ValueError(f"check_chain saw no parameter move in {steps} steps: nothing to check.")
    places = find_manifolds(geometry, moving)
    leaves = places.leaves(moving)
    distances = places.leaves(jax.jit(lambda p: distance_tree(geometry, p))(moving))
    left = {}
    for place in places.real:
        leaf = leaves[place]
        allowed = tolerance
        if allowed is None:
            allowed = 16 * float(jnp.finfo(leaf.dtype).eps) * max((*leaf.shape, 1)) ** 0.5
        farthest = float(jnp.max(distances[place], initial=0.0))
        if not farthest <= allowed:  # a NaN does not pass
            left[places.paths[place]] = farthest
    if left:
        raise ValueError(
            f"after {steps} steps these parameters have left their manifold, at distance {left}."
            " `retract` must be there, and it must be the last link of the chain."
        )
