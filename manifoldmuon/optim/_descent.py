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
from manifoldmuon.optim._geometry import Geometry, constrained, find_manifolds, manifold_of
from manifoldmuon.optim._leaves import map_leaves
from manifoldmuon.optim._retract import note_retracted
from manifoldmuon.optim._steepest import direction_at, keep_found, points_of


def in_one_visit(
    geometry: Geometry,
    budgets: Budgets,
    certify: bool,
    links: Sequence[optax.GradientTransformation],
) -> Callable[..., Any]:
    """Return an update like that of `links` in turn, which visits constrained leaves once.

    On a mesh a visit moves points and updates to the devices that own them, and an answer back.

    Args:
      geometry: of the first link, a `scale_by_steepest`, and of the last, a `retract`.
      budgets: of all links between these but the last what changes constrained leaves.
      certify: of the first link.
      links: the last but one multiplies all updates by one number.
    """
    update_each = [optax.with_extra_args_support(part).update for part in links]

    def update_fn(updates, state, params=None, **extra_args):
        places = find_manifolds(geometry, params)
        shares = find_budgets(budgets, updates)
        shares = {shares.paths[i]: shares.values[i] for i in shares.real}
        if any(jnp.ndim(share) for share in shares.values()):
            return _in_turn(update_each, updates, state, params, extra_args)
        updates = divided_alike(updates, params)
        flat, found = map_leaves(
            direction_at,
            geometry,
            updates,
            params,
            select=lambda manifold: not manifold.constrained,
            carried=state[0].dual,
            divide=True,
        )
        # What it makes of the gradients of constrained leaves is not used.
        flat, middle = _in_turn(update_each[1:-1], flat, state[1:-1], params, extra_args)
        rate = update_each[-2](jnp.ones(()), state[-2])[0]
        leaves, carried = places.leaves(params), {}
        for place in places.real:
            path, entry = places.paths[place], places.values[place]
            if path in shares and constrained(manifold_of(entry)) and path in state[0].dual:
                share = jnp.full(points_of(entry, jnp.shape(leaves[place])), rate * shares[path])
                carried[path] = state[0].dual[path], share
        moved, more = map_leaves(
            _descend, geometry, updates, params, select=constrained, carried=carried, divide=True
        )
        note_retracted(more)
        leaves, answers = places.leaves(flat), places.leaves(moved)
        for place in places.real:
            if places.paths[place] in more:
                leaves[place] = answers[place]
        updates = divided_alike(jax.tree.unflatten(places.treedef, leaves), params)
        return updates, (keep_found(state[0], found | more, certify), *middle, state[-1])

    return update_fn


def _in_turn(update_each, updates, states, params, extra_args):
    new = []
    for update, state in zip(update_each, states, strict=True):
        updates, state = update(updates, state, params, **extra_args)
        new.append(state)
    return updates, tuple(new)


def _descend(manifold: Manifold, point: jax.Array, grad: jax.Array, carried: Any) -> Any:
    dual, share = carried
    direction, numbers = direction_at(manifold, upcast(point), grad, dual)
    step = expand_trailing(share, manifold.ndim).astype(direction.dtype) * direction
    return difference(manifold.retract(upcast(point), step), point), numbers
