"""Normed descent: scale the updates of any optimizer to a target norm per leaf."""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manifoldmuon._internal.arguments import checked, one_of
from manifoldmuon._internal.matrices.arrays import (
    expand_trailing,
    inner_product,
    nonzero_or_one,
    upcast,
)
from manifoldmuon._internal.matrices.powers_of_two import scale_to_unit_exponent, times_power_of_two
from manifoldmuon._internal.meshes.mesh import match_varying_axes
from manifoldmuon._internal.trees.transformations import check_ascends, gradient_transformation
from manifoldmuon.manifolds import Manifold
from manifoldmuon.norms import PowerIterations
from manifoldmuon.optim._budget import Budgets, scale_by_budget
from manifoldmuon.optim._execute import execute
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._plan import make_plan, plan_updates
from manifoldmuon.optim.rules import tangent_part

_ORDINARY = 80  # squared norms between 2**-80 and 2**80 are far from under- and overflow


class NormalizeState(NamedTuple):
    """State of `normalize`: the base optimizer's state, and warm starts of the norms.

    Attributes:
      base: state of the base optimizer.
      vectors: a float32 singular vector per matrix, for leaves with an iterative norm: nested
        dictionaries with the paths of the parameters, but other shapes.
    """

    base: Any
    vectors: dict[str, Any]


@checked
def normalize(
    base: optax.GradientTransformation,
    geometry: Geometry,
    budgets: Budgets = 1.0,
    *,
    iterations: Annotated[PowerIterations, one_of(PowerIterations)] = PowerIterations(),
) -> optax.GradientTransformationExtraArgs:
    """Scale each leaf of an optimizer's updates to its target norm: normed descent.

    `update = budget * base / ||base||` in the norm of each leaf, separately for each point of the
    manifold (modular norm, arXiv:2405.14813, section 2 and appendix A.3). With the budgets of an
    architecture the learning rate of Adam transfers across width and depth.

    Spectral norms are estimated by power iteration from the last step's singular vector; other
    norms are exact. Power iteration gives lower bounds, so an update may exceed its budget: by a
    factor of at most `sqrt(min(m, n))` for an `(m, n)` matrix. The largest factor that we measured,
    for sparse and switching gradients over hundreds of steps, is 1.6; see "Transformations" in the
    documentation.

    On a constrained manifold only the tangent part of the base update is used; it is zero where it
    would be rounding error. To reach a minimum, an entrywise base needs projected gradients,
    `optax.chain(project_tangent(geometry), optax.scale_by_adam())`: Adam's update for the whole
    gradient may be normal to the manifold where the gradient is not.

    Args:
      base: the transformation that computes the updates. It must ascend, like
        `optax.scale_by_adam()`, `optax.trace(0.9)` and `optax.identity()`; `init` refuses a base
        that descends, such as `optax.adam(1e-3)`.
      geometry: the manifold of each parameter, which gives its norm; see `resolve_geometry`.
      budgets: target norms; see `scale_by_budget`.
      iterations: number of power iteration steps.

    Returns:
      A transformation with a `NormalizeState`. Updates have the parameters' dtypes; norms are
      computed in float32 or wider. `update` needs `params`. Zero stays zero; a NaN stays in its
      leaf and does not enter the singular vectors.

    Examples:
      >>> tx = normalize(optax.identity(), mm.manifolds.Euclidean(), budgets=0.5)
      >>> params = jnp.zeros(2)
      >>> tx.update(jnp.array([0.0, 8.0]), tx.init(params), params)[0].tolist()
      [0.0, 0.5]
    """
    base = optax.with_extra_args_support(base)
    shares = scale_by_budget(budgets)
    measure = functools.partial(_tangent_norm, iterations)

    def init_fn(params: Any) -> NormalizeState:
        check_ascends("normalize", base)
        plan = make_plan(geometry, params)
        shares.init(params)
        vectors = plan.by_path(lambda w, x: w.manifold.norm.init_vectors(w.shape(x)), params)
        return NormalizeState(base.init(params), plan.nest(vectors))

    def update_fn(updates, state, params=None, **extra_args):
        plan = plan_updates("normalize", geometry, updates, params)  # the base may broadcast
        updates, base_state = base.update(updates, state.base, params, **extra_args)
        trees, before = (params, updates), plan.flat(state.vectors)
        tangents, sizes = execute("normalize", plan, measure, trees, before)
        lengths, trees = {path: size for path, (size, _) in sizes.items()}, (params, tangents)
        units, _ = execute("normalize", plan, _divide, trees, lengths, stack=False)
        scaled, _ = shares.update(units, optax.EmptyState())
        vectors = {path: after for path, (_, after) in sizes.items()}
        return scaled, NormalizeState(base_state, plan.nest(before | vectors))

    def placeholder(params: Any) -> NormalizeState:
        # A scalar for the dictionary of vectors; see `gradient_transformation`.
        return NormalizeState(base.init(params), jnp.zeros(()))  # type: ignore

    return gradient_transformation(update_fn, init_fn, placeholder)


def _tangent_norm(
    iterations: PowerIterations,
    manifold: Manifold,
    point: jax.Array,
    update: jax.Array,
    vectors: Any,
) -> tuple[Any, Any]:
    """Return the tangent part (None: all), its norm, and the next vectors.

    The norm is a number and a power of two. Updates of ordinary size are not rescaled: on CPUs,
    finding the largest entry and copying would take longer than everything else.
    """
    tangent = tangent_part(manifold, point, update)[0] if manifold.constrained else None

    def as_it_is(update):
        size, after = manifold.norm.estimate(update, vectors, iterations)
        return (size, jnp.zeros_like(size, jnp.int32)), after

    def scaled(update):
        vector, exponent = scale_to_unit_exponent(update, manifold.ndim)
        size, after = manifold.norm.estimate(vector, vectors, iterations)
        return (size, exponent), after

    update, vectors = match_varying_axes((upcast(update if tangent is None else tangent), vectors))
    square = inner_product(update, update, manifold.ndim)
    ordinary = jnp.all((square > 2.0**-_ORDINARY) & (square < 2.0**_ORDINARY))
    return tangent, jax.lax.cond(ordinary, as_it_is, scaled, update)


def _divide(
    manifold: Manifold, point: jax.Array, update: jax.Array, size: tuple[jax.Array, jax.Array]
) -> jax.Array:
    number, exponent = size
    scaled = times_power_of_two(upcast(update), -exponent, manifold.ndim)
    unit = scaled / expand_trailing(nonzero_or_one(number), manifold.ndim)
    return unit.astype(point.dtype)
