"""Normed descent: the update of any optimizer, with every leaf brought to its target norm."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arrays import expand_trailing, inner_product, nonzero_or_one, upcast
from manifoldmuon._internal.mesh import match_varying_axes
from manifoldmuon._internal.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import PowerIterations
from manifoldmuon.optim._arguments import checked
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Geometry, find_manifolds, inner_shape, manifold_of
from manifoldmuon.optim._leaves import (
    Leaf,
    LikePoint,
    batched,
    is_placeholder,
    pair_up,
    replicated_like,
)
from manifoldmuon.optim._tangent import tangent_part

_ORDINARY = 80  # binary places of the square of a norm, far from both ends


class NormalizeState(NamedTuple):
    """The state of the base optimizer, and what the norms start from.

    Attributes:
      base: whatever the base optimizer keeps.
      vectors: by path (see `path_string`), for the leaves whose norm is found by iteration: one
        singular vector for each matrix, float32. None of them has the shape of a parameter.
    """

    base: Any
    vectors: dict[str, Any]


@checked()
def normalize(
    base: optax.GradientTransformation,
    geometry: Geometry,
    budgets: Budgets = 1.0,
    *,
    iterations: PowerIterations = PowerIterations(),
) -> optax.GradientTransformationExtraArgs:
    """Brings each leaf of an optimizer's updates to its target norm: normed descent.

    `update = budget * base / ||base||`, leaf by leaf in each leaf's own norm, one norm for each
    point of the manifold (modular norm, arXiv:2405.14813, section 2 and appendix A.3). With
    the budgets of an architecture the learning rate of Adam transfers across width and depth.
    Spectral norms are found by power iteration from the last step's singular vector, all others
    exactly. Power iteration finds lower bounds, so that an update may be larger than its budget:
    never by more than `sqrt(min(m, n))` for an `(m, n)` matrix, and by at most 1.6 for sparse and
    switching gradients over hundreds of steps; see "Transformations" in the documentation.

    On a constrained manifold the tangent part of the base update is taken first, and is zero where
    that part is rounding.

    Args:
      base: what makes the updates. It must ascend, as `optax.scale_by_adam()`, `optax.trace(0.9)`
        and `optax.identity()` do. An optimizer with a learning rate, such as `optax.adam(1e-3)`,
        already descends: normalised, and turned around by the learning rate behind this link, it
        would climb.
      geometry: which manifold, and so which norm, each parameter has; see `resolve`.
      budgets: target norms; see `scale_by_budget`.
      iterations: how many steps of power iteration to take.

    Returns:
      A transformation whose updates have the parameters' dtypes; norms are computed in float32 or
      wider. Its state is a `NormalizeState`. `update` needs `params`. Zero stays zero, a NaN
      stays in its leaf and enters no vector.

    Raises:
      TypeError: on use; see `resolve` and `scale_by_budget`.
      ValueError: on use; see `resolve` and `scale_by_budget`.
    """
    base = optax.with_extra_args_support(base)
    shares = scale_by_budget(budgets)

    def init_fn(params: Any) -> NormalizeState:
        if is_placeholder(params):  # a leaf that is not a parameter
            return NormalizeState(base.init(params), jnp.zeros(()))  # type: ignore
        places = find_manifolds(geometry, params)
        shares.init(params)
        leaves, vectors = places.leaves(params), {}
        for place in places.real:
            cold = _cold_vectors(places.values[place], jnp.shape(leaves[place]))
            if jax.tree.leaves(cold):
                vectors[places.paths[place]] = replicated_like(cold, leaves[place])
        return NormalizeState(base.init(params), vectors)

    def update_fn(updates, state, params=None, **extra_args):
        pair_up(geometry, updates, params, "normalize")  # before the base, which may broadcast
        updates, base_state = base.update(updates, state.base, params, **extra_args)
        paired = pair_up(geometry, updates, params, "normalize")
        entries, tangents = [leaf.entry for leaf in paired.leaves], _tangents(paired.leaves)
        arguments = []
        for leaf, tangent in zip(paired.leaves, tangents, strict=True):
            cold = _cold_vectors(leaf.entry, leaf.param.shape)
            if jax.tree.leaves(cold) and leaf.path not in state.vectors:
                raise ValueError(
                    f"normalize: the state knows no parameter {leaf.path!r}; it was made for"
                    " another tree. Call tx.init(params) again."
                )
            arguments.append((LikePoint(tangent), state.vectors.get(leaf.path, cold)))

        found = batched(functools.partial(_size, iterations), entries, arguments)
        pairs = zip(paired.leaves, found, strict=True)
        kept = {leaf.path: v for leaf, (_, v) in pairs if leaf.path in state.vectors}
        arguments = [
            (LikePoint(tangent), size) for tangent, (size, _) in zip(tangents, found, strict=True)
        ]
        units = batched(_divide, entries, arguments, stack=False)
        units = [u.astype(leaf.param.dtype) for u, leaf in zip(units, paired.leaves, strict=True)]
        scaled, _ = shares.update(paired.filled(units), optax.EmptyState())
        return scaled, NormalizeState(base_state, state.vectors | kept)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _cold_vectors(entry: Any, shape: tuple[int, ...]) -> Any:
    return manifold_of(entry).norm.init_vectors(inner_shape(entry, shape))


def _tangents(leaves: list[Leaf]) -> list[jax.Array]:
    """The updates' tangent parts, of moderate size; on unconstrained leaves the updates."""
    moving = [leaf for leaf in leaves if manifold_of(leaf.entry).constrained]
    marked = [(LikePoint(leaf.param), LikePoint(leaf.update)) for leaf in moving]

    def part(manifold: Manifold, point: jax.Array, update: jax.Array) -> LikePoint:
        return LikePoint(tangent_part(manifold, point, update)[0])

    parts = batched(part, [leaf.entry for leaf in moving], marked)
    found = {leaf.place: part for leaf, part in zip(moving, parts, strict=True)}
    return [found.get(leaf.place, leaf.update) for leaf in leaves]


def _size(
    iterations: PowerIterations, manifold: Manifold, update: jax.Array, vectors: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """The norm of an update as a number and a power of two, and what the next one starts from.

    An update of ordinary size is read as it is: on CPUs its largest entry, and a scaled copy, would
    take longer than all else.
    """

    def as_it_is(update):
        size, after = manifold.norm.estimate(update, vectors, iterations)
        return (size, jnp.zeros_like(size, jnp.int32)), after

    def scaled(update):
        vector, exponent = scale_to_unit_exponent(update, manifold.ndim)
        size, after = manifold.norm.estimate(vector, vectors, iterations)
        return (size, exponent), after

    update, vectors = match_varying_axes((upcast(update), vectors))
    square = inner_product(update, update, manifold.ndim)
    ordinary = jnp.all((square > 2.0**-_ORDINARY) & (square < 2.0**_ORDINARY))
    return jax.lax.cond(ordinary, as_it_is, scaled, update)


def _divide(manifold: Manifold, update: jax.Array, size: tuple[jax.Array, jax.Array]) -> LikePoint:
    number, exponent = size
    scaled = times_power_of_two(upcast(update), -exponent, manifold.ndim)
    return LikePoint(scaled / expand_trailing(nonzero_or_one(number), manifold.ndim))
