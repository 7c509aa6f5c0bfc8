"""Weights that keep the norm of their start."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from manifoldmuon._internal.arguments import checked
from manifoldmuon._internal.compiling import compiled
from manifoldmuon._internal.first_values import check_values, is_traced, values_are_checked
from manifoldmuon._internal.matrices.arrays import expand_trailing
from manifoldmuon._internal.matrices.powers_of_two import euclidean_norm, to_unit_norm
from manifoldmuon._internal.meshes.mesh import replicated_like
from manifoldmuon._internal.scales import ScaleRule, check_scale, scale_of
from manifoldmuon._internal.trees.matching import match
from manifoldmuon._internal.trees.paths import Spec
from manifoldmuon._internal.trees.transformations import (
    Terminal,
    Transformation,
    gradient_transformation,
)
from manifoldmuon.manifolds import Entry, Manifold
from manifoldmuon.optim._execute import execute, map_leaves
from manifoldmuon.optim._geometry import Geometry
from manifoldmuon.optim._plan import Plan, make_plan, plan_updates
from manifoldmuon.optim._transformation import by_weight
from manifoldmuon.optim.rules import keep_norm, on_sphere

Radius = Spec[float | ScaleRule | None]
"""A number, a rule for a shape, or None for the initial norm; or a spec of these by path."""


class KeepNormsState(NamedTuple):
    """State of `keep_norms`.

    Attributes:
      radius: radii of the leaves on spheres, nested dictionaries with the paths of the parameters:
        a number per point, float32 (float64 for float64 weights). They never change.
    """

    radius: dict[str, Any]


@checked
def keep_norms(geometry: Geometry, radius: Radius = None) -> Transformation:
    """Keep each weight at the norm measured by `init`.

    `W+ = R Norm(W / R + u)` with `Norm(x) = x / ||x||_F`: updates are relative to the radius `R`,
    so the learning rate is an angle to first order, whatever the size of the weight. Like
    `retract` it must be the last transformation: `chain` refuses transformations after it.

    The radius is stored in the state and never measured again. After 1e5 steps the norms of 8 x 8
    matrices were within 5e-4 of the radius in bfloat16 and within 2e-7 in float32; measured again
    in every step, they had drifted by 0.35 and 1e-4. A restored checkpoint keeps its radii. For
    fine-tuning call `init` with the initial weights: their norms are the new radii.

    Args:
      geometry: a `Hypersphere` for each parameter that keeps its norm; its `ndim` and layout
        define a point, and each point has its own radius. With `Hypersphere(ndim=2)` a point is a
        matrix: a layer of a stack, an expert, or (in a layout of blocks) a head. With
        `Hypersphere(ndim=3)` all experts of `(layers, experts, m, n)` in a layer share a radius;
        with `Hypersphere()` each row has its own. The `scale` of the manifold is not used. Updates
        of `Euclidean` leaves pass through, cast to the parameter's dtype.
      radius: replaces the initial norm: a positive number, a rule such as `RootRank()` (for a
        shape in the manifold's layout), None for the initial norm, or a choice for each parameter
        in the forms of a geometry: a prefix tree, `by_path(...)`, or a function of path and leaf.

    Returns:
      A transformation with a `KeepNormsState`. The step is computed in float32 or wider; the
      update has the parameter's dtype and is rounded so that `W + u` is next to the point on the
      sphere. A zero step gives a zero update. A NaN stays in its point. `update` needs `params`.

    Raises:
      ValueError: on use, a constrained leaf is not on a `Hypersphere`; in `init`, a weight has norm
        zero or a norm that is not finite. Give it a `radius`, and the first step takes it there.
        Inside `jax.jit` it is a `JaxRuntimeError` of the running program (on TPUs a warning);
        without the check (`start_anywhere`) the radius is NaN, as is the next weight.

    Examples:
      >>> tx, params = keep_norms(mm.manifolds.Hypersphere()), jnp.array([0.0, 5.0])
      >>> updates, _ = tx.update(jnp.array([0.75, 0.0]), tx.init(params), params)
      >>> round(float(jnp.linalg.norm(optax.apply_updates(params, updates))), 4)
      5.0
    """

    def init_fn(params: Any) -> KeepNormsState:
        return init_radii(geometry, radius, params)

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        plan = plan_updates("keep_norms", geometry, updates, params)
        given = by_weight(plan, state)
        # Not stacked: the compiler fuses a few entrywise operations with their neighbours.
        options: Any = {"select": on_sphere, "stack": False}
        return execute("keep_norms", plan, keep_norm, (params, updates), given, **options)[0], state

    # A scalar for the dictionary of radii; see `gradient_transformation`.
    empty = KeepNormsState(jnp.zeros(()))  # type: ignore
    return gradient_transformation(update_fn, init_fn, lambda _: empty, Terminal)


def match_norms(geometry: Geometry, tree: Any, params: Any) -> Any:
    """Rescale a tree to the norms of the parameters, such as an average of weights of fixed norm.

    An average of points on a sphere lies inside the sphere. Call this before using an average of
    weights trained with `keep_norms`; for manifolds of known scale call
    `optim.project_tree(geometry, average)`.

    Args:
      geometry: the geometry of `keep_norms`. `Euclidean` leaves, and leaves with the entry None,
        are not rescaled.
      tree: for instance `optax.incremental_update(params, average, 0.01)`.
      params: the parameters that give the norms.

    Returns:
      A tree like `tree`; weights on a sphere or `Euclidean` have the dtypes of the parameters.
      Zero weights stay zero.

    Examples:
      >>> match_norms(mm.manifolds.Hypersphere(), jnp.array([0.0, 0.5]), jnp.array([3.0, 4.0]))
      Array([0., 5.], dtype=float32)
    """
    plan = _plan_spheres(geometry, params)
    leaves = plan.leaves(tree)
    trees = [plan.fill(x, dict.fromkeys(plan.rest)) for x in (tree, params)]
    matched, _ = map_leaves(
        _match, geometry, *trees, name="match_norms", select=on_sphere, stack=False
    )
    return plan.fill(matched, {i: leaves[i] for i in plan.rest})


def _match(manifold: Manifold, point: jax.Array, other: jax.Array) -> jax.Array:
    size = expand_trailing(_norm_of(manifold, point, other)[1], manifold.ndim)
    return (size * to_unit_norm(other, manifold.ndim)).astype(point.dtype)


def distance_from_radius(manifold: Manifold, point: jax.Array, radius: jax.Array) -> jax.Array:
    """Return `| ||W|| / R - 1 |` of each point."""
    return jnp.abs(_norm_of(manifold, point, point)[1] / radius - 1).astype(jnp.float32)


def init_radii(geometry: Geometry, radius: Radius, params: Any) -> KeepNormsState:
    """Return the state of `keep_norms`; raise if a norm to be kept is zero or not finite."""
    plan = _plan_spheres(geometry, params)
    given = match(radius, params, _check_radius, "radius").values
    if not plan.weights:
        return KeepNormsState({})  # also of the empty tree None
    leaves, radii, wrong, traced = plan.leaves(params), {}, [], {}
    own = plan.fill(params, dict.fromkeys(plan.rest))
    abstract = any(isinstance(leaves[i], jax.ShapeDtypeStruct) for i in plan.real)

    def measure(tree: Any) -> dict[str, jax.Array]:
        return map_leaves(_norm_of, geometry, tree, tree, name="keep_norms", select=on_sphere)[1]

    if abstract:
        measured = jax.eval_shape(measure, own)
    elif is_traced(own):
        measured = measure(own)
    else:
        spheres = [w for w in plan.weights if on_sphere(w.manifold) and jnp.size(leaves[w.index])]
        points = {w.path: (w.entry, w.of(leaves[w.index])) for w in spheres}
        measured = {p: compiled(_norm_of_leaf, x)(entry, x) for p, (entry, x) in points.items()}
    for weight in plan.weights:
        path, leaf = weight.path, leaves[weight.index]
        if path not in measured:
            continue
        value, norm = given[weight.index], measured[path]
        if value is not None:
            size = scale_of(value, weight.shape(leaf)[-weight.manifold.ndim :])
            norm = jnp.full(norm.shape, size, norm.dtype)
        elif abstract:
            norm = jnp.full(norm.shape, jnp.nan, norm.dtype)
        elif isinstance(norm, Tracer) or not norm.is_fully_addressable:
            unfit = (norm == 0) | ~jnp.isfinite(norm)
            norm = jnp.where(unfit, jnp.nan, norm)
            if isinstance(norm, Tracer):
                traced[path] = jnp.any(unfit)
        elif (unfit := ((numbers := np.asarray(norm)) == 0) | ~np.isfinite(numbers)).any():
            norm = jnp.asarray(np.where(unfit, np.nan, numbers))
            wrong.append(path)
        radii[path] = replicated_like(norm, leaf)
    if values_are_checked():
        _raise_if_unfit(tuple(wrong), *[True] * len(wrong))
        if traced:
            check_values(functools.partial(_raise_if_unfit, tuple(traced)), [*traced.values()])
    return KeepNormsState(plan.nest(radii))


def _raise_if_unfit(paths: tuple[str, ...], *unfit: Any) -> None:
    wrong = [path for path, bad in zip(paths, unfit, strict=True) if bad]
    if wrong:
        raise ValueError(
            f"keep_norms: {wrong} have weights whose norm is zero or not finite, and would keep it."
            " Give a radius, for instance radius=by_path({...: 1.0, '**': None}), or initialise"
            " them differently."
        )


def _norm_of(manifold: Manifold, point: jax.Array, _: jax.Array) -> tuple[None, jax.Array]:
    return None, euclidean_norm(point, manifold.ndim)


def _norm_of_leaf(entry: Entry, leaf: jax.Array) -> jax.Array:
    return map_leaves(_norm_of, [entry], [leaf], [leaf])[1]["0"]


def _plan_spheres(geometry: Geometry, params: Any) -> Plan:
    """Return the plan; raise for constrained manifolds other than spheres."""
    plan = make_plan(geometry, params, rest=True)
    for weight in plan.weights:
        if weight.manifold.constrained and not on_sphere(weight.manifold):
            raise ValueError(
                f"keep_norms: the geometry of {weight.path!r} must be a Hypersphere or free; got"
                f" {weight.manifold}. For matrices, use Hypersphere(ndim=2)."
            )
    return plan


def _check_radius(path: str, radius: Any, leaf: jax.ShapeDtypeStruct) -> None:
    if radius is not None:
        check_scale(f"keep_norms: the radius of {path!r}", radius)
