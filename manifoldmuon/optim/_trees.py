"""Manifold methods for whole trees of parameters: projection, random points."""

from __future__ import annotations

import math
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from manifoldmuon._internal.arguments import shown
from manifoldmuon._internal.compiling import compiled
from manifoldmuon._internal.first_values import is_traced
from manifoldmuon._internal.matrices.arrays import upcast
from manifoldmuon._internal.meshes.mesh import placed_like
from manifoldmuon.manifolds import Entry, Hypersphere, LaidOut, Manifold
from manifoldmuon.optim._execute import map_leaves
from manifoldmuon.optim._geometry import Geometry, constrained
from manifoldmuon.optim._plan import Plan, make_plan

ADAPTERS = (
    "Let a factor of an adapter that starts at zero be free, and constrain the random one:"
    " manifolds.low_rank(shape, rank, zero='B') in PEFT's convention."
)


def project_tree(geometry: Geometry, params: Any) -> Any:
    """Project every parameter to the nearest point of its manifold.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      params: any tree of floating point arrays.

    Returns:
      A tree of the same structure, shapes and dtypes. Unconstrained parameters, and parameters with
      the entry None, do not change.

    Warns:
      UserWarning: a `Hypersphere` of radius 1, the default, changes a norm by more than a factor of
        two; averages of weights with `keep_norms` take `match_norms`. Or zeros become another point
        (an adapter's factor that starts at zero has to be free). Not checked under `jax.jit`.

    Examples:
      >>> project_tree(mm.manifolds.Hypersphere(), {"w": jnp.array([0.0, 1.5])})["w"].tolist()
      [0.0, 1.0]
    """

    projected = nearest_points(geometry, params)
    if not is_traced(params):
        _warn_of_far_moves(make_plan(geometry, params, rest=True), params, projected)
    return projected


def nearest_points(geometry: Geometry, params: Any) -> Any:
    """Return `project_tree`, without its warning."""
    plan = make_plan(geometry, params, rest=True)
    if is_traced(params):
        own = plan.fill(params, dict.fromkeys(plan.rest))
        projected, _ = map_leaves(_project, geometry, own, own, select=constrained)
        return plan.fill(params, {i: plan.leaves(projected)[i] for i in plan.real})
    leaves, points = plan.leaves(params), []
    for weight in plan.weights:
        leaf = weight.of(leaves[weight.index])
        if weight.manifold.constrained:
            leaf = placed_like(compiled(_project_leaf, leaf)(weight.entry, leaf), leaf)
        points.append(leaf)
    return plan.join(points, params, params)


def _warn_of_far_moves(plan: Plan, before: Any, after: Any) -> None:
    """Warn of zeros that are no longer zero, and of norms on spheres of the default radius."""
    trees, factors, zeros = (plan.leaves(before), plan.leaves(after)), [], []
    for weight in plan.weights:
        manifold, pair = weight.manifold, [weight.of(tree[weight.index]) for tree in trees]
        known = all(getattr(x, "is_fully_addressable", hasattr(x, "__array__")) for x in pair)
        if not known or not manifold.constrained:
            continue
        if isinstance(manifold, Hypersphere) and manifold.scale == 1:
            old, new = (np.linalg.norm(np.asarray(x).astype(np.float64)) for x in pair)
            if new > 2 * old or old > 2 * new:
                factors.append(f"{weight.path!r} (times {new / old if old else math.inf:.2g})")
        elif not np.asarray(pair[0]).any() and np.asarray(pair[1]).any():
            zeros.append(weight.path)
    if zeros:
        warnings.warn(
            f"project_tree: no point is nearest to the zeros of {zeros}, and what the model"
            f" computes may change. {ADAPTERS}",
            stacklevel=3,
        )
    if factors:
        warnings.warn(
            f"project_tree: spheres of radius 1 change the norms of {', '.join(factors)}. An"
            " average of weights that keep their norms (muonh, adamh, hyperball) takes"
            " optim.match_norms in place of project_tree; for another radius write"
            " Hypersphere(radius).",
            stacklevel=3,
        )


def init_tree(geometry: Geometry, key: Any, params: Any) -> Any:
    """Return a random point on its manifold for every parameter.

    The values of a leaf depend only on `key` and its path, up to rounding inside `jax.jit`: adding
    a layer does not change the other layers.

    Args:
      geometry: the manifold of each parameter; see `resolve_geometry`.
      key: a JAX random key.
      params: arrays or `jax.ShapeDtypeStruct` that give structure, shapes, dtypes and shardings.

    Returns:
      A tree of the same structure, shapes, dtypes and shardings (under `jax.jit` only explicit
      shardings are kept; set others with `out_shardings`). Every leaf is random, gains and biases
      too; to keep a framework's initial values, call `project_tree` on its parameters. Arrays with
      the entry None do not change.

    Examples:
      >>> shapes = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
      >>> init_tree(mm.manifolds.Stiefel(), jax.random.key(0), shapes)["w"].shape
      (4, 3)
    """
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = isinstance(key, jax.Array) and key.dtype == jnp.uint32
    if not ((typed and key.ndim == 0) or (raw and key.ndim == 1)):
        raise TypeError(
            "init_tree(geometry, key, params): the key must be a single random key of JAX, such as"
            f" jax.random.key(0); got {shown(key)}"
        )
    plan = make_plan(geometry, params, rest=True)
    leaves = plan.leaves(params)
    empty = [plan.paths[i] for i in plan.rest if isinstance(leaves[i], jax.ShapeDtypeStruct)]
    if empty:
        raise ValueError(
            f"init_tree: {empty} have no manifold (None), so they must be arrays; got shapes. Pass"
            " the parameters that the framework has initialised."
        )
    points = [_random_like(w.entry, key, w.path, w.of(leaves[w.index])) for w in plan.weights]
    return plan.join(points, params, params)


def _random_like(entry: Entry, key: PRNGKeyArray, path: str, leaf: Any) -> jax.Array:
    """Return a random point like `leaf` that depends only on the key and the path."""
    shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
    own_key = compiled(_own_key, key)(None, key, np.uint32(zlib.crc32(path.encode())))
    point = compiled(_random_leaf, (key, leaf))((entry, shape, dtype), own_key)
    return placed_like(point, leaf)


def _own_key(_: None, key: PRNGKeyArray, number: Any) -> PRNGKeyArray:
    return jax.random.fold_in(key, number)


def _project(manifold: Manifold, point: jax.Array, _: Any) -> jax.Array:
    return manifold.project(upcast(point)).astype(point.dtype)


def _project_leaf(entry: Entry, leaf: jax.Array) -> jax.Array:
    return map_leaves(_project, [entry], [leaf], [leaf])[0][0]


def _random_leaf(kind: tuple[Entry, tuple[int, ...], Any], key: PRNGKeyArray) -> jax.Array:
    """Return a random point of a kind: entry, shape and dtype."""
    entry, shape, dtype = kind
    if not isinstance(entry, LaidOut):
        return entry.random_point(key, shape, dtype)
    inner = entry.layout.inner_shape(shape)
    return entry.layout.outward(entry.manifold.random_point(key, inner, dtype), shape)
