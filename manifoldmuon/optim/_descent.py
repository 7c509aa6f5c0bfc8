"""Steepest descent with one visit of each constrained leaf: direction, step and retraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arrays import expand_trailing, upcast
from manifoldmuon._internal.links import difference
from manifoldmuon._internal.mesh import divided_alike
from manifoldmuon.manifolds import Manifold
from manifoldmuon.optim._budget import Budgets, find_budgets
from manifoldmuon.optim._geometry import (
    Geometry,
    constrained,
    find_manifolds,
    inner_shape,
    manifold_of,
)
from manifoldmuon.optim._leaves import map_leaves
from manifoldmuon.optim._retract import retracted
from manifoldmuon.optim._steepest import direction_at, keep_found


def in_one_visit(
    geometry: Geometry,
    budgets: Budgets | None,
    certify: bool,
    links: Sequence[optax.GradientTransformation],
) -> Callable[..., Any]:
    """Return an update like that of `links` in turn, which visits constrained leaves once.

    On a mesh a visit moves points and updates to the devices that own them, and an answer back.

    Args:
      geometry: of the first link, a `scale_by_steepest`, and of the last, a `retract`.
      budgets: what the links between these multiply constrained leaves by, before the learning
        rate; None: nothing.
      certify: of the first link.
      links: the chain; the last but one multiplies all updates by one number.
    """
    whole: Any = optax.chain(*links).update
    middle: Any = optax.chain(*links[1:-1]).update
    rate_of: Any = optax.with_extra_args_support(links[-2]).update

    def update_fn(updates, state, params=None, **extra_args):
        places = find_manifolds(geometry, params)
        shares: dict[str, Any] = dict.fromkeys(places.paths, 1.0)
        if budgets is not None:
            listed = find_budgets(budgets, updates)
            shares = {listed.paths[i]: listed.values[i] for i in listed.real}
        if any(jnp.ndim(share) for share in shares.values()):
            return whole(updates, state, params, **extra_args)
        updates = divided_alike(updates, params)
        flat, found = map_leaves(
            direction_at,
            geometry,
            updates,
            params,
            name="scale_by_steepest",
            select=lambda manifold: not manifold.constrained,
            carried=state[0].dual,
            divide=True,
        )
        # What it makes of the gradients of constrained leaves is not used.
        flat, between = middle(flat, state[1:-1], params, **extra_args)
        rate = rate_of(jnp.ones(()), state[-2])[0]
        leaves, carried = places.leaves(params), {}
        for place in places.real:
            path, entry = places.paths[place], places.values[place]
            manifold = manifold_of(entry)
            if path in shares and constrained(manifold) and path in state[0].dual:
                shape = inner_shape(entry, jnp.shape(leaves[place]))
                share = jnp.full(shape[: len(shape) - manifold.ndim], rate * shares[path])
                carried[path] = state[0].dual[path], share
        moved, more = map_leaves(
            _descend,
            geometry,
            updates,
            params,
            name="scale_by_steepest",
            select=constrained,
            carried=carried,
            divide=True,
        )
        if (done := retracted.get()) is not None:
            done.update(more)
        leaves, answers = places.leaves(flat), places.leaves(moved)
        for place in places.real:
            if places.paths[place] in more:
                leaves[place] = answers[place]
        updates = divided_alike(jax.tree.unflatten(places.treedef, leaves), params)
        return updates, (keep_found(state[0], found | more, certify), *between, state[-1])

    return update_fn


def _descend(manifold: Manifold, point: jax.Array, grad: jax.Array, carried: Any) -> Any:
    dual, share = carried
    direction, numbers = direction_at(manifold, upcast(point), grad, dual)
    step = expand_trailing(share, manifold.ndim).astype(direction.dtype) * direction
    return difference(manifold.retract(upcast(point), step), point), numbers
