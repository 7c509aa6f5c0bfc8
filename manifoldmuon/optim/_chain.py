"""Chains in which a retraction is last, and a check for those built elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.optim._geometry import Geometry, lay_out_geometry
from manifoldmuon.optim._retract import LastLink
from manifoldmuon.optim._trees import distance_tree, init_tree


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
    layout = lay_out_geometry(geometry, moving)
    distances, _ = jax.tree.flatten(
        jax.jit(lambda p: distance_tree(geometry, p))(moving), is_leaf=lambda x: x is None
    )
    left = {}
    for index, distance in zip(layout.indices(), filter(_is_array, distances), strict=True):
        leaf = layout.leaves[index]
        allowed = tolerance
        if allowed is None:
            allowed = 16 * float(jnp.finfo(leaf.dtype).eps) * max((*leaf.shape, 1)) ** 0.5
        farthest = float(jnp.max(distance, initial=0.0))
        if not farthest <= allowed:  # a NaN is no pass
            left[layout.paths[index]] = farthest
    if left:
        raise ValueError(
            f"after {steps} steps these parameters have left their manifold, at distance {left}."
            " `retract` must be there, and it must be the last link of the chain."
        )


def _is_array(node: Any) -> bool:
    return isinstance(node, jax.Array)
