"""Normed descent: the update of any optimizer, with every leaf brought to its target norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon.linalg import prescale
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import Effort
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._geometry import Geometry, lay_out_geometry
from manifoldmuon.optim._grouping import replicated_like, together
from manifoldmuon.optim._updates import is_placeholder, pair_up, wide


class NormalizeState(NamedTuple):
    """The state of the base optimizer, and what the norms start from.

    Attributes:
      base: whatever the base optimizer keeps.
      carried: by path (see `path_string`), for the leaves whose norm is found by iteration: one
        singular vector for each matrix, float32. None of them has the shape of a parameter.
    """

    base: Any
    carried: dict[str, Any]


def normalize(
    base: optax.GradientTransformation,
    geometry: Geometry,
    budgets: Budgets = 1.0,
    *,
    effort: Effort = Effort(),
) -> optax.GradientTransformationExtraArgs:
    """Brings each leaf of an optimizer's updates to its target norm: normed descent.

    `update = budget * base / ||base||`, leaf by leaf in each leaf's own norm, one norm for each
    point of the manifold (modular norm, arXiv:2405.14813, section 2 and appendix A.3). With
    the budgets of an architecture the learning rate of Adam transfers across width and depth.
    Spectral norms are found by power iteration from the last step's singular vector, all others
    exactly. They are lower bounds, so that an update may be larger than its budget; see `Effort`
    and "Transformations" in the documentation for by how much.

    On a curved manifold the tangent part of the base update is taken first, and is zero where
    that part is rounding.

    Args:
      base: what makes the updates. It must ascend, as `optax.scale_by_adam()`, `optax.trace(0.9)`
        and `optax.identity()` do. An optimizer with a learning rate, such as `optax.adam(1e-3)`,
        already descends: normalised, and turned around by the learning rate behind this link, it
        would climb.
      geometry: which manifold, and so which norm, each parameter has; see `resolve`.
      budgets: target norms; see `scale_by_budget`.
      effort: how many steps of power iteration to take.

    Returns:
      A transformation whose updates have the parameters' dtypes; norms are computed in float32 or
      wider. Its state is a `NormalizeState`. `update` needs `params`. Zero stays zero, a NaN
      stays in its leaf and enters no carried vector.

    Raises:
      TypeError: on use; see `resolve` and `scale_by_budget`.
      ValueError: on use; see `resolve` and `scale_by_budget`.
    """
    base = optax.with_extra_args_support(base)
    shares = scale_by_budget(budgets)

    def init_fn(params: Any) -> NormalizeState:
        if is_placeholder(params):  # a leaf that is no parameter
            return NormalizeState(base.init(params), jnp.zeros(()))  # type: ignore
        layout = lay_out_geometry(geometry, params)
        carried = {}
        for index in layout.indices():
            leaf = layout.leaves[index]
            cold = layout.values[index].init_carried(jnp.shape(leaf))
            if jax.tree.leaves(cold):
                carried[layout.paths[index]] = replicated_like(cold, leaf)
        return NormalizeState(base.init(params), carried)

    def update_fn(updates, state, params=None, **extra_args):
        updates, base_state = base.update(updates, state.base, params, **extra_args)
        layout, outgoing, pairs = pair_up(geometry, updates, params, "normalize")
        problems = []
        for pair in pairs:
            cold = pair.manifold.init_carried(pair.param.shape)
            if jax.tree.leaves(cold) and pair.path not in state.carried:
                raise ValueError(
                    f"normalize: the state knows no parameter {pair.path!r}; it was made for"
                    " another tree. Call tx.init(params) again."
                )
            problems.append((pair.param, pair.update, state.carried.get(pair.path, cold)))

        def unit(manifold: Manifold, point: jax.Array, update: jax.Array, carried: Any):
            return _unit(manifold, point, update, carried, effort)

        carried = dict(state.carried)
        found = together(unit, [pair.manifold for pair in pairs], problems)
        for pair, (update, (vectors,)) in zip(pairs, found, strict=True):
            outgoing[pair.index] = update
            if pair.path in carried:
                carried[pair.path] = vectors
        scaled, _ = shares.update(layout.rebuild(outgoing), optax.EmptyState())
        return scaled, NormalizeState(base_state, carried)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _unit(
    manifold: Manifold, point: jax.Array, update: jax.Array, carried: Any, effort: Effort
) -> tuple[jax.Array, tuple[Any]]:
    """The tangent part of an update, divided by its norm."""
    vector, _ = prescale(update, manifold.ndim)
    if not manifold.flat:
        vector = _tangent(manifold, wide(point).astype(vector.dtype), vector)
    size, carried = manifold.carried_norm(vector, carried, effort)
    size = manifold.spread(jnp.where(size == 0, 1, size), vector.shape)
    return (vector / size).astype(point.dtype), (carried,)


def _tangent(manifold: Manifold, point: jax.Array, vector: jax.Array) -> jax.Array:
    """The tangent part; zero where it is what rounding leaves of a vector normal to the set."""
    tangent = manifold.tangent(point, vector)
    square, whole = manifold.inner(tangent, tangent), manifold.inner(vector, vector)
    noise = square <= (8 * jnp.finfo(vector.dtype).eps) ** 2 * whole
    return jnp.where(manifold.spread(noise, vector.shape), 0, tangent)
